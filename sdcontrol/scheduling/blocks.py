"""Fixed-size blocks of KV cache: who holds which, and which content can be shared.

Knows nothing of tensors, models or time: block ids, reference counts and content keys. The live
engine and the what-if replay use the same pool. Single-threaded: the owner locks around it.

A block is in exactly one state:

    free        holds nothing of use                       extend    -> referenced
    referenced  one table holds it, or several if it is    release   -> cached when registered,
                registered: then nobody writes it                       else free
    cached      held by no table, content still known      share_prefix -> referenced; evicted -> free
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from sdcontrol.errors import CacheExhausted, ConfigError, IntegrityError

__all__ = ["NULL_BLOCK", "BlockPool", "BlockTable", "block_keys"]

NULL_BLOCK = 0
"""Never handed out: the padding of captured graphs points here."""

_EVICT_AHEAD = 16  # blocks; evicting a few more than needed leaves runs to grow into
_RUN_BLOCKS = 8  # where a table cannot go on consecutively, a longer run is not worth the search
_KEY_BYTES = 16


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request: token position `p` lives in `blocks[p // block_size]`."""

    blocks: list[int] = field(default_factory=list)
    num_shareable: int = 0  # leading blocks offered for sharing already; nobody writes them again


def block_keys(
    tokens: Sequence[int], block_size: int, previous: list[bytes], *, root: bytes = b""
) -> list[bytes]:
    """Extend `previous`, in place, to one key for every full block of `tokens`; returns it.

    A key is the digest of the key before it and the block's tokens, so equal keys mean equal
    prefixes. `root` comes before the first one: whatever else the blocks' content depends on.
    `previous` must stem from the same tokens and root; only blocks beyond it are read.
    """
    for index in range(len(previous), len(tokens) // block_size):
        content = array("q", tokens[index * block_size : (index + 1) * block_size]).tobytes()
        before = previous[-1] if previous else root
        previous.append(blake2b(before + content, digest_size=_KEY_BYTES).digest())
    return previous


class BlockPool:
    """Reference-counted blocks of `block_size` tokens; block 0 of the `num_blocks` is never used."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_sharing: bool = True) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ConfigError(
                f"pool of {num_blocks} blocks of {block_size} tokens; give at least 2 blocks "
                "(block 0 is padding) of at least 1 token"
            )
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._prefix_sharing = prefix_sharing
        self._num_references = [0] * num_blocks
        # One flag per block and a closing 0, so that the block after the last one is never free.
        self._is_free = bytearray(b"\0" + b"\1" * (num_blocks - 1) + b"\0")
        self._num_free = num_blocks - 1
        self._cached: OrderedDict[int, None] = OrderedDict()  # next to be evicted first
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._marks: dict[int, set[str]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in all, the null block included."""
        return self._num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def free_blocks(self) -> int:
        """Blocks that can be had now; cached ones count, since they can be evicted."""
        return self._num_free + len(self._cached)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all usable blocks hold together."""
        return (self._num_blocks - 1) * self._block_size

    def blocks_needed(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that `table` lacks to hold `num_tokens`."""
        return max(0, -(-num_tokens // self._block_size) - len(table.blocks))

    def match_prefix(self, keys: Sequence[bytes], max_tokens: int) -> list[int]:
        """The longest run of registered blocks for `keys`, at most `max_tokens`; takes nothing."""
        matched: list[int] = []
        if self._prefix_sharing:
            for key in keys[: max(max_tokens, 0) // self._block_size]:
                block = self._block_of.get(key)
                if block is None:
                    break
                matched.append(block)
        return matched

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` no table holds: taking those lowers `free_blocks`."""
        return sum(not self._num_references[block] for block in blocks)

    def share_prefix(self, table: BlockTable, keys: Sequence[bytes], max_tokens: int) -> int:
        """Take the blocks of `match_prefix` into an empty table; returns the tokens covered."""
        if table.blocks:
            raise IntegrityError(
                f"a prefix was shared into a table of {len(table.blocks)} blocks; release it first"
            )
        table.blocks = self.match_prefix(keys, max_tokens)
        table.num_shareable = len(table.blocks)
        for block in table.blocks:
            if not self._num_references[block]:
                del self._cached[block]
            self._num_references[block] += 1
        return len(table.blocks) * self._block_size

    def extend(self, table: BlockTable, num_tokens: int, *, expected_tokens: int = 0) -> None:
        """Make `table` hold `num_tokens`, in consecutive blocks where that is possible.

        `expected_tokens` is how long the table may become: a hint for where to start a run.
        Raises `CacheExhausted`, and changes nothing, when the pool lacks the blocks.
        """
        blocks = table.blocks
        needed = -(-num_tokens // self._block_size) - len(blocks)
        if needed <= 0:
            return
        if needed > self._num_free + len(self._cached):
            raise CacheExhausted(
                f"{needed} blocks needed, {self.free_blocks} of {self._num_blocks - 1} free; "
                "lower max_batch_size or raise kv_tokens"
            )
        block = blocks[-1] + 1 if blocks else NULL_BLOCK
        for missing in range(needed, 0, -1):
            if not self._is_free[block]:
                expected = -(-expected_tokens // self._block_size) - len(blocks)
                if blocks:
                    expected = min(expected, _RUN_BLOCKS)
                block = self._start_run(missing, max(missing, expected))
            self._is_free[block] = 0
            self._num_free -= 1
            self._num_references[block] = 1
            self._marks.pop(block, None)
            blocks.append(block)
            block += 1

    def shrink(self, table: BlockTable, num_tokens: int) -> None:
        """Give back the blocks beyond `num_tokens`, but none that was offered for sharing."""
        blocks = table.blocks
        kept = max(-(-num_tokens // self._block_size), table.num_shareable)
        while len(blocks) > kept:
            self._drop(blocks.pop())

    def register(self, table: BlockTable, keys: Sequence[bytes], num_tokens: int) -> None:
        """Offer for sharing the blocks that are full of the first `num_tokens`, all committed.

        Where a block of the same content is known already, that one stays the one to share.
        """
        num_full = min(num_tokens // self._block_size, len(keys), len(table.blocks))
        if num_full <= table.num_shareable or not self._prefix_sharing:
            return
        for index in range(table.num_shareable, num_full):
            block, key = table.blocks[index], keys[index]
            if self._block_of.setdefault(key, block) == block:
                self._key_of[block] = key
        table.num_shareable = num_full

    def release(self, table: BlockTable) -> None:
        """Drop every reference of `table` and empty it; what is registered stays cached.

        The tail goes first, so that it is evicted before the head that it is useless without.
        """
        while table.blocks:
            self._drop(table.blocks.pop())
        table.num_shareable = 0

    def mark(self, block: int, name: str) -> None:
        """Note that `name` holds this block's content too, until the block gets new content."""
        self._marks.setdefault(block, set()).add(name)

    def is_marked(self, block: int, name: str) -> bool:
        """Whether `mark(block, name)` was called since the block got its content."""
        return name in self._marks.get(block, ())

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Raise `IntegrityError` unless the books balance, `tables` being all that hold blocks.

        The conservation law:

            num_blocks - 1  =  free  +  cached   +  referenced
            tables holding     0        0           the reference count
            registered         no       yes         yes wherever tables holding > 1
        """
        held = [0] * self._num_blocks
        for table in tables:
            for block in table.blocks:
                held[block] += 1
        for block in range(self._num_blocks):
            self._check_block(block, held[block])
        num_referenced = sum(count > 0 for count in held)
        total = self._num_free + len(self._cached) + num_referenced
        if total != self._num_blocks - 1 or self._num_free != sum(self._is_free):
            raise IntegrityError(
                f"{self._num_free} free + {len(self._cached)} cached + {num_referenced} referenced "
                f"blocks, {self._num_blocks - 1} usable; please report this"
            )
        if self._block_of != {key: block for block, key in self._key_of.items()}:
            raise IntegrityError("keys and registered blocks disagree; please report this")

    def _check_block(self, block: int, num_held: int) -> None:
        is_free, is_cached = bool(self._is_free[block]), block in self._cached
        is_registered = block in self._key_of
        faults = {
            f"{num_held} tables hold it": num_held != self._num_references[block],
            "it is in two states or none": block != NULL_BLOCK
            and is_free + is_cached + (num_held > 0) != 1,
            "it is shared and not registered": num_held > 1 and not is_registered,
            "it is cached and not registered": is_cached and not is_registered,
            "it is free and registered": is_free and is_registered,
            "it is the null block": block == NULL_BLOCK
            and (is_free or is_cached or is_registered or num_held > 0),
        }
        found = [fault for fault, is_true in faults.items() if is_true]
        if found:
            raise IntegrityError(
                f"block {block}, reference count {self._num_references[block]}: "
                f"{', '.join(found)}; please report this"
            )

    def _drop(self, block: int) -> None:
        self._num_references[block] -= 1
        if self._num_references[block]:
            return
        if block in self._key_of:
            self._cached[block] = None
        else:
            self._is_free[block] = 1
            self._num_free += 1

    def _start_run(self, needed: int, expected: int) -> int:
        """A free block with `expected` free ones from it on, or as many as can be found.

        ... | others  |   free                    | others
                      |            |<- expected ->|
                      |            ^ here: what is left in front is for the others to grow into
        """
        ahead = min(_EVICT_AHEAD, self._num_blocks // 32)
        while self._num_free < min(expected, needed + ahead) and self._cached:
            self._evict_oldest()
        length = expected
        while (start := self._is_free.find(b"\1" * length)) < 0:
            length = length // 2 if length > _RUN_BLOCKS else 1
        return self._is_free.find(0, start) - length

    def _evict_oldest(self) -> None:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        self._is_free[block] = 1
        self._num_free += 1
