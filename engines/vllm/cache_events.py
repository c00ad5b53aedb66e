"""Where vLLM's scheduler publishes its KV events: straight into our index of its cache."""

from __future__ import annotations

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventPublisher

from dynrt.engines.vllm.cache_index import CacheIndex


class CacheEventSink(EventPublisher):
    """Put in place of the scheduler's own publisher."""

    def __init__(self, index: CacheIndex) -> None:
        super().__init__()
        self._index = index

    def publish(self, events: EventBatch) -> None:
        for event in events.events:
            match event:
                case BlockStored():
                    self._index.stored(
                        event.block_hashes, event.parent_block_hash, event.token_ids, _salt(event)
                    )
                case BlockRemoved():
                    self._index.removed(event.block_hashes)
                case AllBlocksCleared():
                    self._index.cleared()

    def shutdown(self) -> None:
        """Nothing was opened."""


def _salt(event: BlockStored) -> str:
    """vLLM mixes a salt into the hash of a prompt's first block, and says so there only."""
    first = (event.extra_keys or [None])[0]
    return first[0] if event.parent_block_hash is None and first else ""
