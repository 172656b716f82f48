#!/usr/bin/env python3
"""Records what transformers' ``MtpModel`` computes for the tiny checkpoints of the tests.

Needs torch and transformers >= 5.24; the tests need neither. For every case named in
``recorded.NAMES`` it writes tests/fixtures/mtp_NAME.safetensors:

    hidden  (L, D)     the trunk's hidden states of ``recorded.PROMPT`` but its last token
    logits  (H, L, V)  of head h in its first L - h rows, each fed by the head before it; 0 behind

and in the metadata the versions and the hash of the checkpoint's weights.

    python scripts/record_mtp_fixtures.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import recorded


def main() -> None:
    """Write one file a case."""
    for name in recorded.NAMES:
        case = recorded.case(name)
        with tempfile.TemporaryDirectory() as folder:
            path = case.write(Path(folder), recorded.published(case))
            file = recorded.path(name)
            file.parent.mkdir(exist_ok=True)
            metadata = {
                "transformers": transformers.__version__, "torch": torch.__version__,
                "weights": recorded.fingerprint(case),
            }  # fmt: skip
            save_file(record(path, case.head_count), file, metadata)
            print(file.name, file.stat().st_size, "bytes")


@torch.no_grad()
def record(path: Path, count: int) -> dict[str, torch.Tensor]:
    """What one checkpoint with ``count`` heads gives."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    prepare(model.config, count)
    # transformers knows the heads of the published sizes by their layers' numbers.
    first = model.config.num_hidden_layers
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.({first}|{first + 1})\."]
    heads = MtpModel.from_pretrained(model)
    heads.config.layer_types = None  # a causal mask for all; it knows of none for indexed ones
    for layer in heads.layers:
        layer.mtp_block.register_forward_hook(only_hidden)
    tokens = torch.tensor([recorded.PROMPT])
    out = model(tokens[:, :-1], output_hidden_states=True)
    hidden = state = out.hidden_states[-1]
    logits = torch.zeros(count, hidden.shape[1], out.logits.shape[-1])
    for index in range(count):
        rows = hidden.shape[1] - index
        follow = tokens[:, 1 + index :]
        state = heads.forward_layer(
            index, state[:, :rows], 1 + index + torch.arange(rows)[None], None, input_ids=follow
        )
        logits[index, :rows] = heads._project_to_logits(state)[0]
    return {"hidden": hidden[0].contiguous(), "logits": logits}


def only_hidden(layer: torch.nn.Module, inputs: object, output: object) -> object:
    """Of a layer that also hands on what the next one's indexer may reuse."""
    return output[0] if isinstance(output, tuple) else output


def prepare(config: transformers.PreTrainedConfig, count: int) -> None:
    """Tell a configuration of its heads, where transformers' class does not know of any."""
    config.num_mtp_layers = count
    for key, kind in (("layer_types", "indexed_attention"), ("mlp_layer_types", "sparse")):
        if getattr(config, key, None) is not None:
            setattr(config, f"mtp_{key}", [kind] * count)


if __name__ == "__main__":
    main()
