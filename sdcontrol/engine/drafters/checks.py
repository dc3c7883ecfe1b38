"""What every drafter is held to. Run it on your own:

    from sdcontrol.engine.drafters.checks import check_drafter

    def test_my_drafter():
        check_drafter(lambda: MyDrafter(...), vocab_size=32000)

Plays made-up texts to the drafter, as an engine would, and compares what it says. Drafters that run
a model (`ModelDrafter`) need an engine's cache and are not for these checks. Knows no drafter.
"""

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence

from sdcontrol.engine.drafters.base import Draft, Drafter, DraftTask
from sdcontrol.engine.drafters.vetting import check_arms, check_drafts, check_hint
from sdcontrol.errors import DrafterFault

__all__ = ["CHECKS", "MakeDrafter", "check_drafter"]

MakeDrafter = Callable[[], Drafter]

_NUM_STEPS = 12
_MOST_DRAFT_TOKENS = 7


def check_drafter(make: MakeDrafter, *, vocab_size: int = 64) -> None:
    """Raise `DrafterFault` for the first of `CHECKS` that `make()` does not pass."""
    for check in CHECKS:
        check(make, vocab_size)


class _Text:
    """A request as drafters see it."""

    def __init__(self, name: str, tokens: Sequence[int]) -> None:
        self.id = name
        self.tokens = list(tokens)


def _keep_all(drafts: Sequence[Draft]) -> list[int]:
    return [_MOST_DRAFT_TOKENS] * len(drafts)


def _propose(
    drafter: Drafter,
    texts: Sequence[_Text],
    num_draft_tokens: int = _MOST_DRAFT_TOKENS,
    keep: Callable[[Sequence[Draft]], list[int]] = _keep_all,
) -> list[Draft]:
    """The drafts of every text for every arm that it may use, one arm after the other."""
    drafts: list[Draft] = []
    for arm in drafter.arms:
        tasks = [
            DraftTask(text, arm, num_draft_tokens)
            for text in texts
            if arm in drafter.arms_for(text)
        ]
        answer = list(drafter.propose(tasks, keep))
        if len(answer) != len(tasks):
            raise DrafterFault(f"{len(answer)} drafts for {len(tasks)} tasks; return one per task")
        drafts.extend(answer)
    return drafts


def _say(drafter: Drafter, text: _Text, tokens: Sequence[int]) -> None:
    text.tokens.extend(tokens)
    drafter.commit(text, len(tokens))


def _started(drafter: Drafter, vocab_size: int, num_texts: int = 3) -> list[_Text]:
    """Texts that repeat themselves, of a few lengths, one token included."""
    texts = []
    for number in range(num_texts):
        rng = random.Random(number)
        phrase = [rng.randrange(vocab_size) for _ in range(1 + 5 * number)]
        texts.append(_Text(f"text-{number}", phrase * (1 + number)))
        drafter.start(texts[-1])
    return texts


def _history(drafter: Drafter, vocab_size: int, seed: int = 0) -> Iterator[list[_Text]]:
    """Texts before every step; between steps some tokens are as drafted and some are not."""
    rng = random.Random(seed)
    texts = _started(drafter, vocab_size)
    for _ in range(_NUM_STEPS):
        yield texts
        for text in texts:
            source = rng.randrange(len(text.tokens))
            copied = text.tokens[source : source + rng.randint(0, 3)]
            _say(drafter, text, [*copied, rng.randrange(vocab_size)])


def _check_equal(what: str, one: Sequence[Draft], other: Sequence[Draft]) -> None:
    shapes = [[(d.tokens, d.parents, d.confidence) for d in drafts] for drafts in (one, other)]
    if shapes[0] != shapes[1]:
        raise DrafterFault(f"{what}: {shapes[0]} and {shapes[1]}")


def check_names(make: MakeDrafter, vocab_size: int) -> None:
    """Arms are distinct names of the drafter's own family, and requests are offered no others."""
    drafter = make()
    if not drafter.arms or len(set(drafter.arms)) < len(drafter.arms):
        raise DrafterFault(f"arms {drafter.arms}: give at least one, each once")
    for text in _started(drafter, vocab_size):
        check_arms(drafter, (*drafter.arms, *drafter.arms_for(text)))


def check_drafts_are_possible(make: MakeDrafter, vocab_size: int) -> None:
    """Drafts hold at most what was asked, tokens of the vocabulary, parents before children."""
    drafter = make()
    for texts in _history(drafter, vocab_size):
        for most in range(1, _MOST_DRAFT_TOKENS + 1):
            for draft in _propose(drafter, texts, most):
                task = DraftTask(texts[0], drafter.name, most)
                check_drafts([draft], [task], vocab_size=vocab_size, allow_trees=True)


def check_hints_are_honest(make: MakeDrafter, vocab_size: int) -> None:
    """No draft is longer than its hint says, and asking for a hint changes no draft."""
    drafter, unasked = make(), make()
    for texts, same in zip(
        _history(drafter, vocab_size), _history(unasked, vocab_size), strict=True
    ):
        for text in texts:
            for arm in drafter.arms_for(text):
                hint = drafter.hint(text, arm)
                check_hint(hint)
                most = None if hint is None else hint.max_draft_tokens
                task = DraftTask(text, arm, _MOST_DRAFT_TOKENS)
                nodes = len(drafter.propose([task], _keep_all)[0].tokens)
                if most is not None and nodes > most:
                    raise DrafterFault(f"{nodes} draft tokens after a hint of at most {most}")
        drafts = _propose(drafter, texts), _propose(unasked, same)
        _check_equal("drafts differ after hints were asked for", *drafts)


def check_same_text_same_drafts(make: MakeDrafter, vocab_size: int) -> None:
    """A draft is a function of the text: asked again, or by another copy, it is the same."""
    drafter, other = make(), make()
    for texts, same in zip(_history(drafter, vocab_size), _history(other, vocab_size), strict=True):
        drafts = _propose(drafter, texts)
        _check_equal("two drafters, one text", drafts, _propose(other, same))
        _check_equal("one drafter asked twice", drafts, _propose(drafter, texts))


def check_texts_do_not_meet(make: MakeDrafter, vocab_size: int) -> None:
    """A request's draft does not depend on who else is in the batch, or in which order."""
    drafter = make()
    for texts in _history(drafter, vocab_size):
        for text in texts:
            _propose(drafter, [text, *texts[::-1]])
            alone = _propose(drafter, [text])
            place = texts.index(text)
            together = [
                draft
                for arm in drafter.arms
                if arm in drafter.arms_for(text)
                for draft in [_one_of(drafter, texts, place, arm)]
            ]
            _check_equal(f"{text.id} alone and in a batch", alone, together)


def _one_of(drafter: Drafter, texts: Sequence[_Text], place: int, arm: str) -> Draft:
    users = [text for text in texts if arm in drafter.arms_for(text)]
    tasks = [DraftTask(text, arm, _MOST_DRAFT_TOKENS) for text in users]
    return drafter.propose(tasks, _keep_all)[users.index(texts[place])]


def check_less_is_a_prefix(make: MakeDrafter, vocab_size: int) -> None:
    """Asked for fewer nodes, or stopped early, a drafter gives the first of the same nodes."""
    drafter = make()
    for texts in _history(drafter, vocab_size):
        full = _propose(drafter, texts)
        for most in range(1, _MOST_DRAFT_TOKENS):
            prefixes = [draft.truncated(most) for draft in full]
            _check_equal(f"{most} tokens asked for", _propose(drafter, texts, most), prefixes)
            stop = _Stopper(most)
            stopped = [
                draft.truncated(most) for draft in _propose(drafter, texts, keep=stop.limits)
            ]
            _check_equal(f"drafting stopped at {most}", stopped, prefixes)


class _Stopper:
    """Allows so many nodes and no more."""

    def __init__(self, most: int) -> None:
        self._most = most

    def limits(self, drafts: Sequence[Draft]) -> list[int]:
        return [self._most] * len(drafts)


def check_commits_add_up(make: MakeDrafter, vocab_size: int) -> None:
    """Ten tokens committed one by one, or at once, or as the prompt, make the same drafts."""
    rng = random.Random(1)
    phrase = [rng.randrange(vocab_size) for _ in range(6)]
    start, rest = phrase * 2, [*phrase, *phrase[:4]]
    drafts = []
    for pieces in ([rest], [[token] for token in rest], []):
        drafter = make()
        text = _Text("text", start if pieces else start + rest)
        drafter.start(text)
        for piece in pieces:
            _say(drafter, text, piece)
        drafts.append(_propose(drafter, [text]))
    _check_equal("committed at once and one by one", drafts[0], drafts[1])
    _check_equal("committed and as prompt", drafts[0], drafts[2])


def check_many_are_as_one(make: MakeDrafter, vocab_size: int) -> None:
    """Requests that are committed, and asked about, together are told the same as one by one."""
    drafter, other = make(), make()
    texts, same = _started(drafter, vocab_size, 16), _started(other, vocab_size, 16)
    for step in range(_NUM_STEPS):
        committed = []
        for number, (text, copy) in enumerate(zip(texts, same, strict=True)):
            new = copy.tokens[number + step : number + 2 * step] or [0]
            _say(other, copy, new)
            text.tokens.extend(new)
            committed.append((text, len(new)))
        drafter.commit_all(committed)
        offers = [dict(offer) for offer in drafter.offers(texts)]
        singly = [{arm: other.hint(copy, arm) for arm in other.arms_for(copy)} for copy in same]
        if offers != singly:
            raise DrafterFault(f"offers to all at once {offers}, and one by one {singly}")
        drafts = _propose(drafter, texts), [d for copy in same for d in _propose(other, [copy])]
        _check_equal("all at once and one by one", *drafts)


def check_requests_are_left_alone(make: MakeDrafter, vocab_size: int) -> None:
    """A drafter reads tokens; it never changes them."""
    drafter = make()
    for texts in _history(drafter, vocab_size):
        before = [list(text.tokens) for text in texts]
        for text in texts:
            for arm in drafter.arms_for(text):
                drafter.hint(text, arm)
        _propose(drafter, texts)
        if before != [text.tokens for text in texts]:
            raise DrafterFault("the tokens of a request were changed; copy them first")


def check_preemption_changes_nothing(make: MakeDrafter, vocab_size: int) -> None:
    """A lost cache is no lost text: drafts are as before."""
    drafter = make()
    for texts in _history(drafter, vocab_size):
        before = _propose(drafter, texts)
        for text in texts:
            drafter.lose_cache(text)
        _check_equal("before and after a preemption", before, _propose(drafter, texts))


def check_finished_requests_are_forgotten(make: MakeDrafter, vocab_size: int) -> None:
    """After `finish` the request is let go, the others stay, and its id may come again."""
    drafter, fresh = make(), make()
    texts = _started(drafter, vocab_size)
    _propose(drafter, texts)
    rest = _propose(drafter, texts[1:])
    gone = weakref.ref(texts[0])
    drafter.finish(texts.pop(0))
    gc.collect()
    if gone() is not None:
        raise DrafterFault("a finished request is still referred to; drop it in finish")
    _check_equal("the others, after one finished", rest, _propose(drafter, texts))
    again = [_Text("text-0", [1, 2, 3, 1, 2]), _Text("text-0", [1, 2, 3, 1, 2])]
    drafter.start(again[0])
    fresh.start(again[1])
    _check_equal(
        "a new request under a finished one's id",
        _propose(drafter, again[:1]),
        _propose(fresh, again[1:]),
    )


CHECKS: tuple[Callable[[MakeDrafter, int], None], ...] = (
    check_names,
    check_drafts_are_possible,
    check_hints_are_honest,
    check_same_text_same_drafts,
    check_texts_do_not_meet,
    check_less_is_a_prefix,
    check_commits_add_up,
    check_many_are_as_one,
    check_requests_are_left_alone,
    check_preemption_changes_nothing,
    check_finished_requests_are_forgotten,
)
"""All of them; each takes `make` and the size of the vocabulary, and raises `DrafterFault`."""
