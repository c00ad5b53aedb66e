"""Where one rank's KV lies."""

from __future__ import annotations

from collections.abc import Sequence

from dynrt.transfer.layout import KvRegion
from dynrt.transfer.ranks.remote import RemoteRank

RankMemory = Sequence[KvRegion] | RemoteRank  # of each layer in this process; or all of it in one of its own
