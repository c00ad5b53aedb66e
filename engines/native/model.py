"""The decoder of the Llama family: one flattened forward pass over prefill chunks and decodes together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812

from dynrt.engines.native.attention import AttentionPlan
from dynrt.engines.native.config import ModelConfig
from dynrt.engines.native.linear import Linear
from dynrt.engines.native.rope import RotaryTable, inverse_frequencies
from dynrt.engines.native.weights import Checkpoint
from dynrt.engines.scheduling.batch import Chunk

OnLayerWritten = Callable[[int, object | None], None]


def load_model(model_dir: str | Path, dtype: torch.dtype, device: torch.device) -> Model:
    """Read a Hugging Face directory. Raises ModelLoadError, see ModelConfig.from_dir and Checkpoint."""
    config = ModelConfig.from_dir(model_dir)
    return Model(config, Checkpoint(Path(model_dir), config, dtype=dtype, device=device), dtype, device)


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the processor multiplies it, else float32.

    On CPU that is AVX512_BF16, which every CPU with AMX has too. A step of a 135M model on an AMD EPYC took 0.65 to
    0.72 of float32's time with it (one decode, 8 decodes, 512 tokens of prefill), but 0.9 to 2.4 with bfloat16
    emulated on AVX512, and up to 4.0 on AVX2.
    """
    if device.type == "cuda" or torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    return torch.float32


class Model:
    """Weights on one device, and the forward pass. The KV cache belongs to the caller."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._inverse_frequencies = inverse_frequencies(config.rope, config.head_size).to(device)
        self._embedding = checkpoint.tensor("model.embed_tokens.weight")
        self._layers = [_Layer(config, checkpoint, layer) for layer in range(config.num_layers)]
        self._norm = checkpoint.tensor("model.norm.weight")
        self._head = Linear(self._embedding if config.tie_embeddings else checkpoint.tensor("lm_head.weight"))

    def new_kv_cache(self, num_blocks: int, block_size: int) -> list[torch.Tensor]:
        """One tensor per layer, [num_blocks, 2 (K, V), block_size, num_kv_heads, head_size].

        Zeroed: attention multiplies unused slots by 0, which would not silence a NaN.
        """
        shape = (num_blocks, 2, block_size, self.config.num_kv_heads, self.config.head_size)
        return [
            torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(self.config.num_layers)
        ]

    def forward(
        self,
        chunks: Sequence[Chunk],
        kv: list[torch.Tensor],
        on_layer_written: OnLayerWritten | None = None,
    ) -> torch.Tensor:
        """As `hidden`. Returns float32 logits [chunks with `sample` set, vocab_size], in the order of `chunks`."""
        hidden = self.hidden(chunks, kv, on_layer_written)
        return self.logits(hidden.last_rows(chunks))

    @torch.inference_mode()
    def hidden(
        self,
        chunks: Sequence[Chunk],
        kv: list[torch.Tensor],
        on_layer_written: OnLayerWritten | None = None,
    ) -> HiddenStates:
        """Compute `chunks`, each of another sequence, and write their keys and values to the caches `kv`.

        `on_layer_written(layer, event)` is called when a layer's KV is in its cache, before that layer's attention
        and MLP; on CUDA it is there once `event` has happened, elsewhere `event` is None.
        """
        assert chunks and all(chunk.token_ids for chunk in chunks), "every chunk computes at least one token"
        order = sorted(range(len(chunks)), key=lambda i: (len(chunks[i].token_ids) > 1, chunks[i].end))
        ordered = [chunks[i] for i in order]
        plan = AttentionPlan(ordered, kv[0])
        rotary = RotaryTable(self._inverse_frequencies, self._tensor(_positions(ordered)), self.dtype)
        x = self._embedding[self._tensor([token_id for chunk in ordered for token_id in chunk.token_ids])]
        for layer, weights in enumerate(self._layers):
            q, k, v = weights.qkv(x, rotary)
            plan.write(kv[layer], k, v)
            if on_layer_written is not None:
                on_layer_written(layer, self._record_event())
            x += weights.o(plan.attend(kv[layer], q))
            x += weights.mlp(x)
        return HiddenStates(x, _first_rows(chunks, order))

    @torch.inference_mode()
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Float32 [rows, vocab_size] of hidden states [rows, hidden_size]."""
        if len(x) == 0:
            return torch.empty((0, self.config.vocab_size), device=self.device)
        return self._head(F.rms_norm(x, self._norm.shape, self._norm, self.config.rms_norm_eps)).float()

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _record_event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


class HiddenStates(msgspec.Struct, frozen=True):
    """What the last layer made of each token: `x` [tokens, hidden_size], a chunk's rows together."""

    x: torch.Tensor
    first_rows: list[int]  # where in `x` each chunk begins

    def last_rows(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """The last token's, of each chunk with `sample` set."""
        firsts = zip(self.first_rows, chunks, strict=True)
        rows = [first + len(chunk.token_ids) - 1 for first, chunk in firsts if chunk.sample is not None]
        return self.x[torch.tensor(rows, dtype=torch.int64, device=self.x.device)]

    def rows_of(self, index: int, chunks: Sequence[Chunk]) -> torch.Tensor:
        """All of chunk `index`."""
        return self.x[self.first_rows[index] : self.first_rows[index] + len(chunks[index].token_ids)]


class _Layer:
    """One transformer block without its attention: what is computed for each token by itself."""

    __slots__ = ("_config", "_down", "_gate_up", "_input_norm", "_post_norm", "_qkv", "o")

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, layer: int) -> None:
        self._config = config
        prefix = f"model.layers.{layer}."

        def linear(names: Sequence[str], has_bias: bool) -> Linear:
            weight = checkpoint.stacked([f"{prefix}{name}.weight" for name in names])
            bias = checkpoint.stacked([f"{prefix}{name}.bias" for name in names]) if has_bias else None
            return Linear(weight, bias)

        self._input_norm = checkpoint.tensor(f"{prefix}input_layernorm.weight")
        self._qkv = linear([f"self_attn.{name}_proj" for name in "qkv"], config.qkv_bias)
        self.o = linear(["self_attn.o_proj"], config.o_bias)
        self._post_norm = checkpoint.tensor(f"{prefix}post_attention_layernorm.weight")
        self._gate_up = linear(["mlp.gate_proj", "mlp.up_proj"], config.mlp_bias)
        self._down = linear(["mlp.down_proj"], config.mlp_bias)

    def qkv(self, x: torch.Tensor, rotary: RotaryTable) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, and values, of `x` [tokens, hidden_size]; each [tokens, heads, head_size]."""
        config = self._config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = self._qkv(self._normed(x, self._input_norm)).view(len(x), -1, config.head_size)
        rotated = rotary.rotate(heads[:, :num_rotated])
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], heads[:, num_rotated:]

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """The gated feed-forward part, [tokens, hidden_size] to the same."""
        gate, up = self._gate_up(self._normed(x, self._post_norm)).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up))

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)


def _positions(chunks: Sequence[Chunk]) -> list[int]:
    return [position for chunk in chunks for position in range(chunk.start, chunk.end)]


def _first_rows(chunks: Sequence[Chunk], order: Sequence[int]) -> list[int]:
    """The row of each chunk's first token; rows follow `order`, the result follows `chunks`."""
    first_rows = [0] * len(chunks)
    num_rows = 0
    for i in order:
        first_rows[i] = num_rows
        num_rows += len(chunks[i].token_ids)
    return first_rows
