"""The figures that documents show, written from the results: `python -m benchmarks.figures`.

A document marks a place with `<!-- figures: NAME -->` and `<!-- end of figures -->`; what stands
between is made here, from `benchmarks/results/*.json` alone. A test says when it is due. Knows how
results look; measures nothing.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from math import floor
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
PLACE = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL)

MEASURES = {"mean_tpot_ms": "time per output token", "tokens_per_second": "tokens/s"}

Row = dict[str, Any]


def results(name: str) -> Row:
    """One file of results."""
    found: Row = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """In Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def made(found: Row) -> str:
    """By which command, when and where."""
    processor = found.get("processor") or found["machine"]
    threads = f", threads: {found['threads']}" if "threads" in found else ""
    return f"`{found['command']}`, {str(found['date'])[:10]}, {processor}{threads}."


def engine() -> str:
    """Ratios to transformers."""
    found = results("engine-float32")
    rows = [
        (
            row["case"].replace("_", " "),
            f"`{row['ours']}`",
            f"`{row['theirs']}`",
            f"{row['speed']:.2f}x",
            f"{row['low']:.2f} to {row['high']:.2f}",
            f"{row['target']}x, {met(row['speed'] >= row['target'], row['low'] >= row['target'])}",
        )
        for row in found["results"]
    ]
    heads = ("case", "ours", "theirs", "speed", "interval", "target")
    return f"{table(heads, rows)}\n\n{made(found)}"


def met(by_median: bool, by_interval: bool) -> str:
    """How far a target is met."""
    if by_interval:
        return "met"
    return "met in the median only" if by_median else "missed"


def ngram() -> str:
    """Microseconds of the n-gram drafter."""
    found = results("ngram")
    rows = [
        (f"{int(tokens):,}", f"{one['hint + propose']:.2f}", f"{one['commit']:.1f}")
        for tokens, one in found["cost"]["default"].items()
    ]
    heads = ("tokens of context", "hint and proposal, µs (target 5)", "indexing new tokens, µs")
    return f"{table(heads, rows)}\n\n{made({'command': 'python -m benchmarks.ngram', **found})}"


def divergence() -> str:
    """First differences by arm."""
    found = results("divergence-bfloat16")
    rows = []
    for row in found["results"]:
        rate = 1000 * row["first_differences_per_token"]
        low, high = (1000 * end for end in row["interval_95"])
        rows.append((row["arm"], f"{rate:.1f} ({low:.1f} to {high:.1f})"))
    return f"{table(('arm', 'per 1,000 tokens'), rows)}\n\n{made(found)}"


def policies() -> str:
    """What planning and observing take, and how good plans are."""
    found = results("policies")
    plans = [row for row in found["results"] if row.get("time") == "plan"]
    rows = []
    for row in (row for row in found["results"] if row.get("time") == "plan and observe"):
        alone = [plan["median_us"] for plan in plans if plan["batch"] == row["batch"]]
        both = (row["plan_median_us"], row["observe_median_us"])
        share = f"{min(alone):.0f} to {max(alone):.0f}"
        rows.append((row["batch"], share, *(f"{us:.0f}" for us in both)))
    heads = ("batch", "policy's plan, µs", "controller's plan, µs", "observe, µs")
    beside = [
        (row["beside"], row["instances"], f"{row['least']:.4f}", at_least(row["mean"]))
        for row in found["results"]
        if "beside" in row
    ]
    better = ("plans of goodput beside", "instances", "least ratio", "mean ratio")
    return f"{table(heads, rows)}\n\n{table(better, beside)}\n\n{made(found)}"


def at_least(value: float) -> str:
    """Rounded down: what is below 1 is not shown as 1."""
    return f"{floor(value * 1e5) / 1e5:.5f}"


def acceptance() -> str:
    """By world: what believing costs."""
    found = results("acceptance")
    rows = []
    for name in dict.fromkeys(row["world"] for row in found["results"]):
        mine = [row for row in found["results"] if row["world"] == name]
        ages = ("young", "old", "first")
        rows.append((name, *[f"{row[age]:.3f}" for row in mine for age in ages]))
    batches = dict.fromkeys(row["batch"] for row in found["results"])
    columns = [(f"batch {n}: young", "older", "the very first") for n in batches]
    heads = ("requests", *[head for three in columns for head in three])
    return f"{table(heads, rows)}\n\n{made(found)}"


def simulated_regret() -> str:
    """By machine."""
    found = results("simulated_regret")
    machines = list(dict.fromkeys(row["machine"] for row in found["results"]))
    rows = []
    for machine in [*machines, ""]:
        mine = [row for row in found["results"] if row["machine"] == machine or not machine]
        fixed = [row["goodput_over_best_fixed"] for row in mine]
        off = [row["goodput_over_off"] for row in mine]
        figures = (f"{value:.3f}" for value in (min(fixed), median(fixed), min(off)))
        rows.append((machine or "all", len(mine), *figures))
    heads = ("machine", "cells", "over the best fixed, least", "median", "over off, least")
    return f"{table(heads, rows)}\n\n{made(found)}"


def simulated_promise() -> str:
    """By batch size and by acceptance; on machines with shorter steps all in one."""
    found = results("simulated_promise")
    rows = []
    usual, *faster = dict.fromkeys(row["machine"] for row in found["results"])
    groups = [("batch_size", "batch", usual), ("acceptance", "acceptance", usual)]
    groups += [("", f"all, {machine}", machine) for machine in (usual, *faster)]
    for key, kind, machine in groups:
        here = [row for row in found["results"] if row["machine"] == machine]
        for value in sorted({row[key] for row in here}) if key else [""]:
            mine = [row for row in here if not key or row[key] == value]
            best, none, rival = (
                [row[name] for row in mine]
                for name in ("of_best_fixed", "of_none", "whole_of_rival")
            )
            figures = (min(best), median(best), min(none), median(none), median(rival))
            words = (f"{figure:.3f}" for figure in figures)
            rows.append((f"{kind} {value}" if key else kind, len(mine), *words))
    heads = ("load", "cells", "of the best fixed, least", "median", "of none, least", "median")
    return f"{table((*heads, 'of budget_argmax, median'), rows)}\n\n{made(found)}"


def known_machine() -> str:
    """By engine, told of the machine or not."""
    found = results("known_machine")
    rows = []
    for engine in [*dict.fromkeys(row["engine"] for row in found["results"]), ""]:
        mine = [row for row in found["results"] if row["engine"] == engine or not engine]
        for name in ("untold", "told"):
            ratios = sorted(row[f"{name}_over_best_fixed"] for row in mine)
            figures = (ratios[0], ratios[len(ratios) // 10], fmean(ratios))
            words = (f"{value:.3f}" for value in figures)
            rows.append(
                (engine or "all", {"untold": "nothing", "told": "the roofline"}[name], *words)
            )
    heads = ("engine", "starts from", "over the best fixed, least", "a tenth lies below", "mean")
    return f"{table(heads, rows)}\n\n{made(found)}"


def closed_batches() -> str:
    """Simulated machines, means of seeds; live cells with their intervals."""
    found = results("closed_batches")
    rows = []
    simulated = [row for row in found["results"] if row["is_simulated"]]
    keys = ("goodput_over_best_fixed", "goodput_over_each_step_alone", "goodput_over_off")
    first = "first_batch_over_best_fixed", "warm_start_over_best_fixed"
    for name in dict.fromkeys(row["name"] for row in simulated):
        mine = [row for row in simulated if row["name"] == name]
        best = ", ".join(dict.fromkeys(row["best_fixed"] for row in mine))
        means = (f"{fmean(row[key] for row in mine):.3f}" for key in (*keys, *first))
        rows.append((name, "simulated", best, *means))
    for row in found["results"]:
        if not row["is_simulated"]:
            live = [row.get(key.replace("_over_", "_to_")) for key in (*keys, *first)]
            words = (
                f"{r['median']:.3f} ({r['low']:.3f} to {r['high']:.3f})" if r else "-" for r in live
            )
            when = f", {row['measured']['date']}" if "measured" in row else ""
            rows.append((row["name"], f"live{when}", row["best_fixed"], *words))
    heads = (
        "batch",
        "",
        "best fixed",
        "of best fixed",
        "of each step alone",
        "of off",
        "the first batch of all, of best fixed",
        "the same with a warm start",
    )
    return f"{table(heads, rows)}\n\n{made(found)}"


def late_draft_model() -> str:
    """Live cells whose draft model computes each prompt."""
    found = results("late_draft_model")
    keys = ("goodput_to_best_fixed", "goodput_to_each_for_itself", "goodput_to_off")
    rows = []
    for row in found["results"]:
        ratios = [row[key] for key in (*keys, "best_fixed_to_off")]
        words = (f"{r['median']:.3f} ({r['low']:.3f} to {r['high']:.3f})" for r in ratios)
        rows.append((row["name"], row["measured"]["date"], row["best_fixed"], *words))
    heads = (
        "cell",
        "measured",
        "best fixed",
        "of best fixed",
        "of each for itself",
        "of off",
        "best fixed of off",
    )
    return f"{table(heads, rows)}\n\n{made(found)}"


def regret() -> str:
    """Live cells and workloads."""
    return live_regret("regret")


def regret_epyc() -> str:
    """The same on another processor."""
    return live_regret("regret_epyc")


def regret_avx512() -> str:
    """The same on a third one, but for two workloads."""
    return live_regret("regret_avx512")


def live_regret(name: str) -> str:
    """The tables of one file of live cells and workloads."""
    from benchmarks.regret.table import markdown  # loads torch

    found = results(name)
    return f"{markdown(found['results'])}\n\n{made(found)}"


def cells_of(name: str) -> list[float]:
    """Medians over the best fixed setting, by live cell."""
    return [r["to_best"]["median"] for r in results(name)["results"] if not r["is_workload"]]


def learned() -> str:
    """How well the learned policy predicts, and what it gains in simulations."""
    found = results("learned")
    rows = []
    for row in (row for row in found["results"] if row["what"] == "prediction"):
        loss, error = row["log_loss"], row["mean_log_step_error"]
        rows.append(
            (
                row["trained_on"],
                row["judged_on"],
                row["online_cost_starts_from"],
                f"{loss['learned']:.3f} / {loss['online']:.3f}",
                f"{error['learned']:.3f} / {error['online']:.3f}",
            )
        )
    heads = ("trained on", "judged on", "online cost from", "log loss", "mean log error of a step")
    cells = [row for row in found["results"] if "learned_over_goodput" in row]
    machines = []
    for machine in dict.fromkeys(row["machine"] for row in cells):
        mine = [row["learned_over_goodput"] for row in cells if row["machine"] == machine]
        machines.append((machine, len(mine), f"{min(mine):.3f}", f"{median(mine):.3f}"))
    gains = ("machine, simulated", "cells", "over goodput, least", "median")
    return f"{table(heads, rows)}\n\n{table(gains, machines)}\n\n{made(found)}"


def learned_live() -> str:
    """How new controllers begin with what was learnt, beside those without."""
    from benchmarks.learned_live import RATIOS, over_all  # loads torch

    found = results("learned_live")
    rows = []
    for row in [*found["results"], over_all(found["results"])]:
        ratios = [row[key] for key in RATIOS]
        words = (f"{r['mean']:.3f} ({r['low']:.3f} to {r['high']:.3f})" for r in ratios)
        rows.append((row["name"], f"{row['steps']:.0f}", *words))
    heads = ("case", "steps", "first block", "all of it", "two arms of goodput apart")
    return f"{table(heads, rows)}\n\n{made(found)}"


def replay() -> str:
    """Speed, memory and scaling of the simulation."""
    found = results("replay")
    by_name = {row["what"]: row for row in found["results"]}
    speed, memory, scaling = by_name["speed"], by_name["memory"], by_name["scaling"]
    rows = [
        ("output tokens a minute", f"{speed['million_tokens_per_minute']} million", "5 million"),
        (f"memory for {memory['requests']:,} requests", f"{memory['peak_mib']:.0f} MiB", "1 GB"),
        ("two processes over one, median", f"{scaling['median']:.2f}x", "1.8x"),
    ]
    return f"{table(('what', 'figure', 'target'), rows)}\n\n{made(found)}"


def fidelity() -> str:
    """How near replays are to live runs."""
    found = results("fidelity")
    row = next(row for row in found["results"] if "configurations" in row)
    wrong = row["ranked_wrongly"]
    pairs = row["pairs_more_than_5_percent_apart"]
    rows = [
        (f"median error of {row['configurations']}", f"{row['median_error']:.1%}", "5 %"),
        ("worst error", f"{row['worst_error']:.1%}", "15 %"),
        ("pairs apart by more than 5 %, ranked right", f"{pairs - len(wrong)} of {pairs}", "all"),
    ]
    named = f"\n\nRanked wrongly: {'; '.join(wrong)}." if wrong else ""
    return f"{table(('what', 'figure', 'target'), rows)}{named}\n\n{made(found)}"


def self_replay() -> str:
    """Recorded policies replayed."""
    found = results("self_replay")
    row = next(row for row in found["results"] if "recordings" in row)
    n = row["recordings"]
    rows = [
        ("same tokens for every request", f"{row['same_tokens']} of {n}", "all"),
        ("every recorded step taken", f"{row['all_steps_repeated']} of {n}", ""),
        *(
            (
                f"tokens/s, {name} step times",
                f"within 3 % in {row[key]['within_3_percent']} of {row[key]['replays']}; "
                f"median {row[key]['median_error']:.1%}, worst {row[key]['worst_error']:.1%}",
                "3 %",
            )
            for key, name in (("recorded", "recorded"), ("fitted", "fitted"))
        ),
    ]
    return f"{table(('what', 'figure', 'target'), rows)}\n\n{made(found)}"


def public_traces() -> str:
    """Over the best fixed setting and the best rival."""
    found = results("public_traces")
    cells = {(row["workload"], row["load"]): row for row in found["results"] if "workload" in row}
    loads = ("low", "middle", "high")
    rows = [
        [name, *(_against(cells[name, load]) for load in loads)]
        for name in dict.fromkeys(name for name, _ in cells)
    ]
    measures = [next(r["compared"] for (_, at), r in cells.items() if at == load) for load in loads]
    heads = [f"{load}, {MEASURES[at]}" for load, at in zip(loads, measures, strict=True)]
    return f"{table(['workload', *heads], rows)}\n\n{made(found)}"


def _against(cell: Row) -> str:
    by = ("to_best_fixed", "to_best_rival")
    return " / ".join(f"{cell[key][cell['compared']]['ratio']:.3f}" for key in by)


def ab() -> str:
    """How often comparisons claim a difference."""
    found = results("ab")
    rows = []
    for row in found["results"]:
        if "runs" in row:
            rows.append((row["part"], f"{row['claims']} of {row['runs']:,} claim a difference"))
        elif "ratio" in row:
            value, low, high = row["ratio"]
            blocks = f"{row['blocks_run']} blocks ({row['blocks_needed']} needed)"
            rows.append((row["part"], f"{value:.3f} [{low:.3f}, {high:.3f}], {blocks}"))
            rows[-1] = (rows[-1][0], f'{rows[-1][1]}: "{row["verdict"]}"')
        elif "kills" in row:
            lost = row["finished_blocks_lost_or_changed"]
            rows.append((row["part"], f"{row['kills']} kills, {lost} finished blocks lost"))
    return f"{table(('part', 'outcome'), rows)}\n\n{made(found)}"


def recording() -> str:
    """What recording takes of a step."""
    found = results("recording")
    rows = []
    for row in found["results"]:
        wall, whole = (
            [100.0 * (ratio - 1.0) for ratio in row[of]] for of in ("wall", "end_to_end")
        )
        rows.append(
            (
                row["batch"],
                f"{row['step_milliseconds']:.0f} ms",
                f"{wall[0]:+.1f} % [{wall[1]:+.1f}, {wall[2]:+.1f}]",
                f"{whole[0]:+.1f} % [{whole[1]:+.1f}, {whole[2]:+.1f}]",
            )
        )
    heads = ("batch", "step", "by the wall clock (target 1 %)", "CPU of loop and writer thread")
    return f"{table(heads, rows)}\n\n{made(found)}"


def summary() -> str:
    """The README's table."""
    ours = {row["case"]: f"{row['speed']:.2f}x" for row in results("engine-float32")["results"]}
    plans = next(row for row in results("policies")["results"] if "beside" in row)
    regret = [r["goodput_over_best_fixed"] for r in results("simulated_regret")["results"]]
    live = [cells_of(name) for name in ("regret", "regret_epyc", "regret_avx512")]
    public = [row for row in results("public_traces")["results"] if "workload" in row]
    over = [row["to_best_fixed"][row["compared"]]["ratio"] for row in public]
    by_name = {row["what"]: row for row in results("replay")["results"]}
    speed, memory = by_name["speed"]["million_tokens_per_minute"], by_name["memory"]
    foreseen, again = results("fidelity")["results"][0], results("self_replay")["results"][0]
    rows = [
        (
            "text equal to the model's own",
            "26,422 tokens, 8 architectures, no difference",
            "`tests/test_engine_exact.py`",
        ),
        (
            "engine against `generate` on a CPU",
            f"plain {ours['plain_batch_1']} (batch 1), {ours['plain_batch_16']} (batch 16); n-gram "
            f"{ours['ngram_against_prompt_lookup']} prompt look-up; draft model "
            f"{ours['draft_model_against_assisted']} assisted",
            "`benchmarks.engine`",
        ),
        (
            f"plans against brute force, {plans['instances']:,} instances",
            f"least {plans['least']:.3f}, mean {at_least(plans['mean'])}",
            "`benchmarks.policies`",
        ),
        (
            f"adaptive over the best fixed setting, {len(regret)} simulated cells, learning included",
            f"least {min(regret):.3f}, median {median(regret):.2f}",
            "`benchmarks.simulated_regret`",
        ),
        (
            f"the same in {len(live[0])} live cells, on each of three CPUs",
            "; ".join(f"least {min(cells):.3f}, median {median(cells):.2f}" for cells in live),
            "`benchmarks.regret`",
        ),
        (
            f"the same on public arrivals and texts, {len(over)} simulated cells",
            f"least {min(over):.2f}",
            "`benchmarks.public_traces`",
        ),
        (
            "what-if replay against live runs, tokens/s",
            f"median error {100 * foreseen['median_error']:.1f} %, "
            f"worst {100 * foreseen['worst_error']:.1f} %",
            "`benchmarks.fidelity`",
        ),
        (
            f"what-if replay of the recorded policy, {again['recordings']} live recordings",
            f"same tokens in {again['same_tokens']}, tokens/s within 3 % in "
            f"{again['recorded']['within_3_percent']} with recorded step times, in "
            f"{again['fitted']['within_3_percent']} with fitted ones",
            "`benchmarks.self_replay`",
        ),
        (
            "replay",
            f"{speed} million simulated tokens a minute and core; {memory['requests']:,} requests in "
            f"{memory['peak_mib']:.0f} MiB",
            "`benchmarks.replay`",
        ),
    ]
    return table(("what", "figure", "where"), rows)


FIGURES: dict[str, Callable[[], str]] = {
    one.__name__: one
    for one in (
        engine,
        ngram,
        divergence,
        policies,
        acceptance,
        simulated_regret,
        simulated_promise,
        known_machine,
        closed_batches,
        late_draft_model,
        regret,
        regret_epyc,
        regret_avx512,
        learned,
        learned_live,
        replay,
        fidelity,
        self_replay,
        recording,
        public_traces,
        ab,
        summary,
    )
}


def filled(text: str) -> str:
    """A document with every marked place made anew."""
    return PLACE.sub(lambda at: f"{at[1]}{FIGURES[at[2]]()}\n{at[4]}", text)


def main() -> int:
    """Write all of them."""
    argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__).parse_args()
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
