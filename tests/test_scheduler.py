"""The scheduler: every history keeps the books balanced, the cache right and nobody starved."""

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sdcontrol.errors import ConfigError, IntegrityError, RequestRefused
from sdcontrol.scheduling.blocks import BlockPool, BlockTable, block_keys
from sdcontrol.scheduling.scheduler import Row, ScheduledBatch, ScheduledRequest, Scheduler

BLOCK_SIZE = 4


def make_request(
    name: str,
    num_tokens: int,
    max_tokens: int,
    *,
    shareable: bool = True,
    recompute_tail_tokens: int = 0,
) -> ScheduledRequest:
    return ScheduledRequest(
        id=name,
        num_tokens=num_tokens,
        max_tokens=max_tokens,
        keys=block_keys([7] * num_tokens, BLOCK_SIZE, []),
        shareable=shareable,
        recompute_tail_tokens=recompute_tail_tokens,
    )


def make_scheduler(
    num_blocks: int = 100, max_batch_size: int = 8, max_prefill_tokens: int = 1000
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, BLOCK_SIZE),
        max_batch_size=max_batch_size,
        max_prefill_tokens=max_prefill_tokens,
    )


def run_step(scheduler: Scheduler) -> ScheduledBatch:
    """One step without drafts; requests finish at `max_tokens`."""
    batch = scheduler.next_batch()
    for row in (*batch.decoding, *batch.prefilling):
        request = row.request
        cached = request.cached_tokens + row.num_new_tokens
        scheduler.commit(request, cached, request.num_tokens + row.completes)
        if request.num_tokens == request.max_tokens:
            scheduler.finish(request)
    scheduler.check_integrity()
    return batch


# -- one fact at a time --------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=5)
    with pytest.raises(RequestRefused, match="grow to 17 tokens, the KV cache holds 16"):
        scheduler.submit(make_request("a", 3, 17))
    scheduler.submit(make_request("a", 3, 16))
    assert scheduler.num_waiting == 1


def test_an_id_in_use_is_refused_and_free_again_later() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 3, 8)
    scheduler.submit(request)
    with pytest.raises(RequestRefused, match="is taken"):
        scheduler.submit(make_request("a", 3, 8))
    scheduler.next_batch()
    with pytest.raises(RequestRefused, match="is taken"):
        scheduler.submit(make_request("a", 3, 8))
    scheduler.finish(request)
    scheduler.submit(make_request("a", 3, 8))


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(0, 5), (6, 5)])
def test_impossible_lengths_are_refused(num_tokens: int, max_tokens: int) -> None:
    with pytest.raises(RequestRefused, match="at least 1 token"):
        make_scheduler().submit(make_request("a", num_tokens, max_tokens))


@pytest.mark.parametrize("setting", ["max_batch_size", "max_prefill_tokens"])
def test_a_scheduler_that_could_run_nothing_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        make_scheduler(**{setting: 0})


def test_a_long_prompt_is_prefilled_in_chunks_and_its_last_chunk_completes() -> None:
    scheduler = make_scheduler(max_prefill_tokens=8)
    scheduler.submit(make_request("a", 19, 30))
    chunks = [run_step(scheduler).prefilling[0] for _ in range(3)]
    assert [(row.num_new_tokens, row.completes) for row in chunks] == [
        (8, False),
        (8, False),
        (3, True),
    ]
    assert [row.request.id for row in run_step(scheduler).decoding] == ["a"]


def test_the_prefill_budget_goes_to_the_oldest_first() -> None:
    scheduler = make_scheduler(max_prefill_tokens=8)
    for name in "abc":
        scheduler.submit(make_request(name, 6, 30, shareable=False))
    rows = run_step(scheduler).prefilling
    assert [(row.request.id, row.num_new_tokens) for row in rows] == [("a", 6), ("b", 2)]
    assert scheduler.num_waiting == 1


def test_a_batch_says_whether_others_wait_for_a_place() -> None:
    scheduler = make_scheduler(max_batch_size=1)
    for name in "ab":
        scheduler.submit(make_request(name, 1, 2))
    assert [run_step(scheduler).others_wait for _ in range(2)] == [True, False]


def test_decoding_goes_on_beside_a_prefill() -> None:
    scheduler = make_scheduler(max_prefill_tokens=8)
    scheduler.submit(make_request("a", 3, 30))
    run_step(scheduler)
    scheduler.submit(make_request("b", 20, 30))
    batch = run_step(scheduler)
    assert [row.request.id for row in batch.decoding] == ["a"]
    assert batch.prefill_tokens == 8


def test_a_prompt_of_one_token_decodes_at_once() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", 1, 8))
    (row,) = run_step(scheduler).decoding
    assert row.is_decode
    assert row.completes
    assert row.num_new_tokens == 1


def test_a_prompt_cached_but_for_one_token_decodes_at_once() -> None:
    scheduler = make_scheduler()
    first, second = make_request("a", 9, 20), make_request("b", 9, 20)
    scheduler.submit(first)
    run_step(scheduler)
    scheduler.submit(second)
    batch = scheduler.next_batch()
    assert [row.request.id for row in batch.decoding] == ["a", "b"]
    assert second.cached_tokens == 8
    assert second.table.blocks[:2] == first.table.blocks[:2]


def test_at_least_one_token_of_a_cached_prompt_is_computed() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", 8, 20))
    run_step(scheduler)
    request = make_request("b", 8, 20)
    scheduler.submit(request)
    assert scheduler.next_batch().prefill_tokens == 4
    assert request.cached_tokens == 4


@pytest.mark.parametrize(
    ("recompute_tail_tokens", "cached_tokens"), [(0, 16), (1, 12), (4, 12), (5, 8), (99, 0)]
)
def test_the_tail_to_recompute_is_not_shared(
    recompute_tail_tokens: int, cached_tokens: int
) -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", 17, 30))
    run_step(scheduler)
    request = make_request("b", 17, 30, recompute_tail_tokens=recompute_tail_tokens)
    scheduler.submit(request)
    scheduler.next_batch()
    assert request.cached_tokens == cached_tokens


def test_a_request_that_is_not_shareable_neither_takes_nor_offers() -> None:
    scheduler = make_scheduler()
    private, public, other = (
        make_request("a", 9, 20, shareable=False),
        make_request("b", 9, 20),
        make_request("c", 9, 20, shareable=False),
    )
    for request in (private, public, other):
        scheduler.submit(request)
        run_step(scheduler)
    assert not set(private.table.blocks) & set(public.table.blocks)
    assert not set(other.table.blocks) & set(public.table.blocks)


def test_max_batch_size_bounds_what_runs() -> None:
    scheduler = make_scheduler(max_batch_size=2)
    for name in "abc":
        scheduler.submit(make_request(name, 2, 8))
    scheduler.next_batch()
    assert [request.id for request in scheduler.running] == ["a", "b"]
    assert scheduler.num_waiting == 1


def test_a_request_is_not_admitted_when_those_that_run_will_need_its_blocks() -> None:
    """5 blocks: 2 are held, 2 would do for the second, 1 for the first to grow into is missing."""
    for num_blocks, num_running in ((6, 1), (7, 2)):
        scheduler = make_scheduler(num_blocks=num_blocks)
        scheduler.submit(make_request("a", 8, 20, shareable=False))
        run_step(scheduler)
        run_step(scheduler)
        scheduler.submit(make_request("b", 6, 8, shareable=False))
        scheduler.next_batch()
        assert len(scheduler.running) == num_running


@pytest.mark.parametrize(("max_tokens", "is_admitted"), [(16, True), (17, False)])
def test_room_is_kept_only_for_requests_that_can_grow(max_tokens: int, is_admitted: bool) -> None:
    """8 usable blocks, 4 held by the first; the second needs 4."""
    scheduler = make_scheduler(num_blocks=9)
    scheduler.submit(make_request("a", 14, max_tokens, shareable=False))
    run_step(scheduler)
    scheduler.submit(make_request("b", 13, 16, shareable=False))
    scheduler.next_batch()
    assert (len(scheduler.running) == 2) == is_admitted


@pytest.mark.parametrize(("max_tokens", "is_admitted"), [(8, True), (9, False)])
def test_a_request_is_admitted_only_with_room_for_the_token_after_its_prompt(
    max_tokens: int, is_admitted: bool
) -> None:
    """5 usable blocks, 3 held for good by the first; the second's prompt fills the other 2."""
    scheduler = make_scheduler(num_blocks=6)
    scheduler.submit(make_request("a", 10, 12, shareable=False))
    run_step(scheduler)
    scheduler.submit(make_request("b", 8, max_tokens, shareable=False))
    scheduler.next_batch()
    assert (len(scheduler.running) == 2) == is_admitted


def test_the_youngest_is_preempted_and_computes_prompt_and_output_again() -> None:
    scheduler = make_scheduler(num_blocks=7)
    old = make_request("a", 4, 24, shareable=False)
    young = make_request("b", 4, 16, shareable=False)
    scheduler.submit(old)
    scheduler.submit(young)
    batch = run_step(scheduler)
    while not batch.preempted:
        batch = run_step(scheduler)
    assert batch.preempted == (young,)
    assert [row.request for row in batch.decoding] == [old]
    assert young.num_tokens > 4
    assert (young.cached_tokens, young.table.blocks) == (0, [])
    assert scheduler.num_preemptions == 1
    again = run_step(scheduler)
    while not again.prefilling:
        again = run_step(scheduler)
    assert again.prefilling[0].request is young
    assert again.prefilling[0].num_new_tokens == young.num_tokens - 1  # one more was emitted


def test_rejected_slots_go_back() -> None:
    scheduler = make_scheduler(num_blocks=20)
    request = make_request("a", 3, 60)
    scheduler.submit(request)
    run_step(scheduler)
    scheduler.next_batch()
    scheduler.reserve(request, 30)
    assert len(request.table.blocks) == 9
    scheduler.commit(request, 4, 5)
    assert len(request.table.blocks) == 2


def decoding_scheduler(
    num_blocks: int = 100, *lengths: int
) -> tuple[Scheduler, list[ScheduledRequest]]:
    """These requests, their prompts computed, each with one token to come."""
    scheduler = make_scheduler(num_blocks)
    requests = [make_request(f"r{n}", length, 20) for n, length in enumerate(lengths)]
    for request in requests:
        scheduler.submit(request)
    run_step(scheduler)
    scheduler.next_batch()
    return scheduler, requests


def test_a_step_ahead_is_the_one_that_would_come_after() -> None:
    scheduler, requests = decoding_scheduler(100, 3, 5, 8)
    twin, others = decoding_scheduler(100, 3, 5, 8)
    for _ in range(9):
        ahead = scheduler.next_ahead(())
        run_step(twin)
        after = twin.next_batch()
        assert ahead is not None
        assert [r.request.id for r in ahead.decoding] == [r.request.id for r in after.decoding]
        for ours, other in zip(requests, others, strict=True):
            assert (ours.num_tokens, ours.cached_tokens) == (other.num_tokens, other.cached_tokens)
            assert len(ours.table.blocks) == len(other.table.blocks)
        for request in requests:  # once the tokens are known
            scheduler.commit(request, request.cached_tokens, request.num_tokens)
        scheduler.check_integrity()


def test_those_that_end_do_not_take_part_in_the_step_ahead() -> None:
    scheduler, requests = decoding_scheduler(100, 3, 5)
    before = requests[0].num_tokens
    ahead = scheduler.next_ahead({"r0"})
    assert ahead is not None
    assert [row.request.id for row in ahead.decoding] == ["r1"]
    assert requests[0].num_tokens == before
    assert scheduler.next_ahead({"r0", "r1"}) is None


def test_a_step_ahead_that_is_taken_back_leaves_counts_as_they_were() -> None:
    scheduler, requests = decoding_scheduler(100, 3, 7)
    before = [(r.num_tokens, r.cached_tokens) for r in requests]
    assert scheduler.next_ahead(()) is not None
    scheduler.step_back(requests)
    assert [(r.num_tokens, r.cached_tokens) for r in requests] == before
    scheduler.check_integrity()


def test_no_step_ahead_where_blocks_are_short() -> None:
    """Each of two needs a block in the same step; with one left, somebody has to be preempted."""
    scheduler, requests = decoding_scheduler(6, 7, 7)
    assert scheduler.next_ahead(()) is None
    assert [r.num_tokens for r in requests] == [8, 8]
    scheduler, _ = decoding_scheduler(7, 7, 7)
    assert scheduler.next_ahead(()) is not None


def test_no_step_ahead_while_somebody_prefills_or_could_be_admitted() -> None:
    scheduler, requests = decoding_scheduler(100, 3)
    scheduler.submit(make_request("new", 6, 40))
    assert scheduler.next_ahead(()) is None
    batch = scheduler.next_batch()
    assert batch.prefill_tokens == 6
    assert scheduler.next_ahead(()) is None
    assert requests[0].num_tokens == 4


def test_who_waits_for_blocks_holds_nobody_up_until_some_come_free() -> None:
    scheduler = make_scheduler(9)
    running = [make_request(name, 9, 14) for name in ("a", "b")]
    for request in (*running, make_request("c", 9, 14)):
        scheduler.submit(request)
    run_step(scheduler)
    assert scheduler.next_batch().others_wait
    ahead = scheduler.next_ahead(())
    assert ahead is not None
    assert ahead.others_wait
    assert scheduler.next_ahead({"a"}) is None, "c could have its blocks"
    for request in running:
        scheduler.commit(request, request.cached_tokens, request.num_tokens)
    scheduler.finish(running[0])
    assert scheduler.next_ahead(()) is None


def test_cancelling_gives_the_blocks_back_whether_it_waits_or_runs() -> None:
    scheduler = make_scheduler(num_blocks=20, max_batch_size=1)
    running, waiting = make_request("a", 9, 20), make_request("b", 9, 20)
    scheduler.submit(running)
    scheduler.submit(waiting)
    scheduler.next_batch()
    assert scheduler.cancel("b") is waiting
    assert scheduler.cancel("a") is running
    assert scheduler.cancel("a") is None
    assert not scheduler.has_work
    assert not scheduler.is_running(running)
    scheduler.check_integrity()


def test_what_was_cancelled_can_be_neither_committed_nor_finished() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 9, 20)
    scheduler.submit(request)
    scheduler.next_batch()
    scheduler.cancel("a")
    with pytest.raises(IntegrityError, match="does not run"):
        scheduler.commit(request, 9, 10)
    with pytest.raises(IntegrityError, match="neither waiting nor running"):
        scheduler.finish(request)


def test_blocks_held_by_a_waiting_request_are_noticed() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 9, 20)
    scheduler.submit(request)
    request.cached_tokens = 4
    with pytest.raises(IntegrityError, match="waits and has blocks"):
        scheduler.check_integrity()


# -- draft slots ---------------------------------------------------------------------------------


def most_blocks(slacks: list[int], block_size: int, num_draft_tokens: int) -> int:
    """The most blocks that any way of spreading the draft tokens over the rows takes."""
    spreads = product(range(num_draft_tokens + 1), repeat=len(slacks))
    return max(
        sum(-(-max(0, n - slack) // block_size) for n, slack in zip(spread, slacks, strict=True))
        for spread in spreads
        if sum(spread) == num_draft_tokens
    )


@given(
    block_size=st.integers(1, 4),
    slacks=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    free_blocks=st.integers(0, 4),
)
@settings(max_examples=200, deadline=None)
def test_free_draft_tokens_is_the_most_that_fits_however_it_is_spread(
    block_size: int, slacks: list[int], free_blocks: int
) -> None:
    rows, num_used = [], 0
    for index, slack in enumerate(slacks):
        num_blocks = slack // block_size + 1
        tokens = num_blocks * block_size - slack
        table = BlockTable(list(range(num_used + 1, num_used + 1 + num_blocks)))
        num_used += num_blocks
        request = ScheduledRequest(
            id=str(index), num_tokens=tokens, max_tokens=99, cached_tokens=tokens - 1, table=table
        )
        rows.append(Row(request, 1, is_decode=True, completes=True))
    pool = BlockPool(1 + num_used + free_blocks, block_size)
    pool.extend(BlockTable(), num_used * block_size)
    scheduler = Scheduler(pool, max_batch_size=8, max_prefill_tokens=8)
    most = scheduler.free_draft_tokens(ScheduledBatch(tuple(rows), (), ()))
    assert most_blocks(slacks, block_size, most) <= free_blocks
    assert most_blocks(slacks, block_size, most + 1) > free_blocks


def test_no_draft_tokens_are_free_for_nobody() -> None:
    assert make_scheduler().free_draft_tokens(ScheduledBatch((), (), ())) == 0


# -- any history ---------------------------------------------------------------------------------

JUNK = "junk"


class Histories(RuleBasedStateMachine):
    """Random histories over a tiny pool, beside a model of the KV memory.

    `memory[block, offset]` is the prefix that the entry was computed from, so an entry that was
    overwritten, shared wrongly or never computed shows when it is read.
    """

    NUM_BLOCKS = 10
    MAX_BATCH_SIZE = 4
    MAX_PREFILL_TOKENS = 7

    def __init__(self) -> None:
        super().__init__()
        pool = BlockPool(self.NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler = Scheduler(
            pool, max_batch_size=self.MAX_BATCH_SIZE, max_prefill_tokens=self.MAX_PREFILL_TOKENS
        )
        self.pool = pool
        self.tokens: dict[str, list[int]] = {}
        self.requests: dict[str, ScheduledRequest] = {}
        self.memory: dict[tuple[int, int], object] = {}
        self.num_submitted = 0

    @rule(
        prompt=st.tuples(st.integers(1, 20), st.integers(0, 2)),
        max_new_tokens=st.integers(1, 16),
        shareable=st.booleans(),
        recompute_tail_tokens=st.sampled_from([0, 0, 3]),
    )
    def submit(
        self,
        prompt: tuple[int, int],
        max_new_tokens: int,
        shareable: bool,
        recompute_tail_tokens: int,
    ) -> None:
        length, kind = prompt
        tokens = ([1] * 8 + [kind] * 12)[:length]
        request = ScheduledRequest(
            id=str(self.num_submitted),
            num_tokens=length,
            max_tokens=min(length + max_new_tokens, self.pool.capacity_tokens),
            keys=block_keys(tokens, BLOCK_SIZE, []),
            shareable=shareable,
            recompute_tail_tokens=recompute_tail_tokens,
        )
        self.num_submitted += 1
        self.tokens[request.id] = tokens
        self.requests[request.id] = request
        self.scheduler.submit(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        assert self.scheduler.cancel(name) is self.requests.pop(name)

    @rule(seed=st.integers(0, 1 << 30))
    def step(self, seed: int) -> None:
        self.run_step(random.Random(seed), may_cancel=True)

    @invariant()
    def books_balance(self) -> None:
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        """Once submissions stop, the oldest progresses at every step, so all finish in time."""
        steps_left = sum(request.max_tokens for request in self.requests.values())
        rng = random.Random(0)
        while self.scheduler.has_work:
            assert steps_left, f"starved: {list(self.requests)}"
            steps_left -= 1
            self.run_step(rng, may_cancel=False)
            self.scheduler.check_integrity()
        assert not self.requests
        assert self.pool.free_blocks == self.NUM_BLOCKS - 1

    def run_step(self, rng: random.Random, *, may_cancel: bool) -> None:
        before = self.scheduler.running
        batch = self.scheduler.next_batch()
        self.check_batch(batch, before)
        drafts = self.spread(self.scheduler.free_draft_tokens(batch), batch, rng)
        for row in batch.decoding:
            self.scheduler.reserve(row.request, drafts[row.request.id])
        if may_cancel and self.requests and rng.random() < 0.1:
            name = rng.choice(sorted(self.requests))
            self.scheduler.cancel(name)
            del self.requests[name]
        for row in (*batch.decoding, *batch.prefilling):
            if self.scheduler.is_running(row.request):
                self.compute(row, drafts.get(row.request.id, 0), rng)

    def check_batch(self, batch: ScheduledBatch, before: tuple[ScheduledRequest, ...]) -> None:
        running = self.scheduler.running
        rows = [*batch.decoding, *batch.prefilling]
        assert len(running) <= self.MAX_BATCH_SIZE
        assert batch.prefill_tokens <= self.MAX_PREFILL_TOKENS
        assert {row.request for row in batch.decoding} == {
            request for request in running if request.pending_tokens == 1
        }
        assert all(row.is_decode for row in batch.decoding)
        assert not any(row.is_decode for row in batch.prefilling)
        assert len({row.request.id for row in rows}) == len(rows)
        assert all(row.request in running and row.num_new_tokens > 0 for row in rows)
        assert not before or before[0] in running
        assert all(
            victim.arrival > request.arrival for victim in batch.preempted for request in running
        )
        if running:
            assert running[0] in {row.request for row in rows}
        for request in running:
            if request not in before and request not in batch.preempted:
                most = max(0, request.num_tokens - 1 - request.recompute_tail_tokens)
                assert request.cached_tokens <= (most if request.shareable else 0)

    def spread(self, free: int, batch: ScheduledBatch, rng: random.Random) -> dict[str, int]:
        """Draft tokens per decoding request, as many as a plan may have."""
        drafts: dict[str, int] = {}
        for row in rng.sample(batch.decoding, len(batch.decoding)):
            remaining = row.request.max_tokens - row.request.num_tokens
            drafts[row.request.id] = rng.randint(0, max(0, min(free, remaining - 1)))
            free -= drafts[row.request.id]
        return drafts

    def compute(self, row: Row, num_draft_tokens: int, rng: random.Random) -> None:
        """Write and read as an engine would: drafts first, then the row, then what it attends to."""
        request, tokens = row.request, self.tokens[row.request.id]
        start, end = request.cached_tokens, request.cached_tokens + row.num_new_tokens
        assert row.completes == (end == request.num_tokens)
        num_accepted = rng.randint(0, num_draft_tokens)
        emitted = [rng.randint(0, 1) for _ in range(num_accepted + 1)] if row.completes else []
        text = tokens + emitted
        for position in range(request.num_tokens, request.num_tokens + num_draft_tokens):
            is_accepted = position < request.num_tokens + num_accepted
            self.write(request, position, tuple(text[: position + 1]) if is_accepted else JUNK)
        for position in range(start, end):
            self.write(request, position, tuple(text[: position + 1]))
        num_cached = end + num_accepted
        for position in range(num_cached):
            assert self.memory[self.slot(request, position)] == tuple(text[: position + 1])
        self.tokens[request.id] = text
        block_keys(text, BLOCK_SIZE, request.keys)
        self.scheduler.commit(request, num_cached, len(text))
        assert len(request.table.blocks) <= max(-(-len(text) // BLOCK_SIZE), -(-end // BLOCK_SIZE))
        if request.num_tokens == request.max_tokens or (row.completes and rng.random() < 0.05):
            self.scheduler.finish(request)
            del self.requests[request.id]

    def write(self, request: ScheduledRequest, position: int, entry: object) -> None:
        block, offset = self.slot(request, position)
        tables = [other.table for other in self.scheduler.running]
        assert sum(block in table.blocks for table in tables) == 1, "a shared block was written"
        assert position // BLOCK_SIZE >= request.table.num_shareable
        self.memory[block, offset] = entry

    def slot(self, request: ScheduledRequest, position: int) -> tuple[int, int]:
        return request.table.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE


class TestHistories(Histories.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_histories_meet_preemption_sharing_and_rejection() -> None:
    """The machine above is only worth its name if its histories get into trouble."""
    histories, rng = Histories(), random.Random(1)
    num_shared = 0
    for _ in range(400):
        if rng.random() < 0.5:
            histories.submit((rng.randint(1, 20), rng.randint(0, 2)), rng.randint(1, 16), True, 0)
        histories.run_step(rng, may_cancel=True)
        held = [block for r in histories.scheduler.running for block in r.table.blocks]
        num_shared += len(held) - len(set(held))
    histories.teardown()
    assert histories.scheduler.num_preemptions > 20
    assert num_shared > 100
