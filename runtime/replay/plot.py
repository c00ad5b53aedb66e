"""A picture of replays: how time to first token and time between tokens are distributed, a line for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynrt.runtime.errors import ConfigError
from dynrt.runtime.replay.replay import Replayed


def check_can_plot(path: Path) -> None:
    """Before anything is replayed. Raises ConfigError."""
    _load_figure()
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no directory {path.parent}; make it first")


def plot(replays: Sequence[Replayed], path: Path) -> None:
    """Write a picture in the format that the file's ending names. Raises ConfigError."""
    figure = _load_figure().Figure(figsize=(11, 4.5), layout="constrained")
    ttft, itl = figure.subplots(1, 2)
    for replayed in replays:
        served = [one for one in replayed.served if one.error is None]
        _draw(ttft, [one.ttft_s for one in served], replayed.policy)
        _draw(itl, [1e3 * one.itl_s for one in served if one.request.output_tokens > 1], replayed.policy)
    ttft.set(xlabel="time to first token, s", ylabel="share of requests", xscale="log")
    itl.set(xlabel="mean time between tokens, ms", xscale="log")
    ttft.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: an ending that names no format
        raise ConfigError(f"--plot {path}: {error}") from error


def _draw(axes: Any, values: list[float], label: str) -> None:
    """The share of values up to each of them."""
    ordered = sorted(values)
    shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
    axes.step(ordered, shares, where="post", label=label)


def _load_figure() -> Any:
    try:
        from matplotlib import figure
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib ({error}); install it with: pip install 'dynrt[plot]'"
        ) from error
    return figure
