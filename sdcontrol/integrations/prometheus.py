"""Prometheus metrics of what a controller decides and what comes of it.

    exporter = PrometheusExporter()                    # the default registry
    engine = Engine(model, planner=exporter.wrap(Controller()), ...)
    prometheus_client.start_http_server(9100)

Fed from observations alone; knows nothing of engines and tensors. The counters of drafts, draft tokens
and accepted tokens are named as inference servers name theirs, so that the usual queries work:

    rate(sdcontrol_spec_decode_num_accepted_tokens_total[1m])
      / rate(sdcontrol_spec_decode_num_draft_tokens_total[1m])            acceptance rate
    1 + rate(..._num_accepted_tokens_total[1m]) / rate(..._num_drafts_total[1m])    acceptance length

Needs `prometheus_client`: `pip install sdcontrol[metrics]`.
"""

from typing import cast

from sdcontrol.core import BatchView, Confidence, Observation, Plan, Planner
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.cost import Prediction
from sdcontrol.estimators.known_machine import KnownMachine
from sdcontrol.estimators.roofline import Forward
from sdcontrol.extras import needed

with needed():
    from prometheus_client import REGISTRY, CollectorRegistry

from sdcontrol.integrations.metric_groups import (
    DecodingMetrics,
    FaultMetrics,
    IntensityMetrics,
    TimeMetrics,
)

__all__ = ["PrometheusExporter"]


class PrometheusExporter:
    """Counts observations into metrics of a registry.

    `target`, the model on its machine, adds the arithmetic intensity of steps; a wrapped controller that
    knows both, as on a GPU of the hardware table, says so of its own. Several planners may share an exporter:
    counters and histograms add them up, gauges tell of the one that stepped last.
    Two exporters of one registry need different namespaces. Raises `ConfigError` for names that the registry
    has, and for a `target` that cannot be priced.
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        namespace: str = "sdcontrol",
        target: Forward | None = None,
    ) -> None:
        if target is not None:
            target.profile(1, 1, 1)  # said now, not to whoever scrapes, nor once names are taken
        self._registry, self._namespace = registry, namespace
        try:
            self._decoding = DecodingMetrics(registry, namespace)
            self._time = TimeMetrics(registry, namespace)
            self._faults = FaultMetrics(registry, namespace)
        except ValueError as error:
            raise ConfigError(
                f"metrics of namespace {namespace!r} cannot be registered: {error}; give another "
                "namespace, or a registry of its own"
            ) from error
        self._intensity = None if target is None else IntensityMetrics(registry, namespace, target)

    def observe(self, observation: Observation, prediction: Prediction | None = None) -> None:
        """Count one step; `prediction` is what was expected of it, where somebody expects."""
        self._decoding.observe(observation)
        self._time.observe(observation, prediction)
        self._faults.observe(observation)
        if self._intensity is not None:
            self._intensity.observe(observation)

    def wrap(self, planner: Planner) -> Planner:
        """The same planner, whose observations are counted after it has learnt from them.

        Of a `Controller` it also exports predicted step times, drift and quarantine.
        """
        return cast(Planner, _Counted(planner, self))

    def observe_planner(self, planner: object) -> None:
        """Export what a controller says of itself; other planners say nothing."""
        self._faults.observe_planner(planner)
        self._time.observe_cost(getattr(planner, "cost", None))
        machine = getattr(planner, "machine", None)
        if self._intensity is None and isinstance(machine, KnownMachine) and machine.hardware:
            target = Forward(machine.target, machine.hardware)
            self._intensity = IntensityMetrics(self._registry, self._namespace, target)


class _Counted:
    """A planner and an exporter. Everything else that the planner has shines through."""

    def __init__(self, planner: Planner, exporter: PrometheusExporter) -> None:
        self._planner = planner
        self._exporter = exporter

    @property
    def wrapped(self) -> Planner:
        """The planner itself, for whoever writes down what it is."""
        return self._planner

    def __getattr__(self, name: str) -> object:
        if name == "_planner":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._planner, name)

    def plan(self, view: BatchView) -> Plan:
        """The planner's plan."""
        return self._planner.plan(view)

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        """The planner's shorter plan."""
        return self._planner.refine(view, plan, confidence)

    def observe(self, observation: Observation) -> None:
        """The planner learns, the exporter counts."""
        before = self._prediction()
        self._planner.observe(observation)
        after = self._prediction()
        self._exporter.observe_planner(self._planner)
        self._exporter.observe(observation, None if after is before else after)

    def _prediction(self) -> Prediction | None:
        prediction = getattr(getattr(self._planner, "cost", None), "last_prediction", None)
        return prediction if isinstance(prediction, Prediction) else None
