"""Fine-tuning runs small enough for tests: a model of a few thousand numbers, and questions that can be learnt."""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from apollo_optim.cli import main

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same, with marks around what is to be learned."""

STEPS, BATCH = 6, 8
COLOURS, THINGS = ("red", "green", "blue"), ("apple", "boat", "cat", "drum", "egg")


class TuningGround(NamedTuple):
    """What every run of the tests shares."""

    model: Path
    """A model's folder, with a tokenizer that has a chat template."""
    bare: Path
    """The same without a chat template."""
    data: Path
    cache: Path

    def flags(self, out: Path, *more: str) -> list[str]:
        """A command line; flags in `more` come last and so count."""
        flags = {
            "model": self.model, "data": self.data, "cache": self.cache, "out": out, "steps": STEPS, "batch": BATCH,
            "micro-batch": 4, "warmup": 2, "rank": 4, "log-every": 2, "eval-every": 3, "save-every": 2, "dropout": 0,
            "device": "cpu",
        }  # fmt: skip
        return ["finetune", *(text for name, value in flags.items() for text in (f"--{name}", str(value))), *more]

    def run(self, out: Path, *more: str) -> int:
        """The exit status of a run."""
        return main(self.flags(out, *more))


def questions(count: int = 60) -> list[dict[str, str]]:
    """Questions whose answers repeat a word of them, in the schema of LLM-Adapters."""
    draw = random.Random(0)
    found = []
    for number in range(count):
        colour, thing = draw.choice(COLOURS), draw.choice(THINGS)
        asked = " ".join([f"the {thing} is {colour}.", *["so it is."] * (number % 4), f"which colour is the {thing}?"])
        found.append({"instruction": asked, "input": "", "output": f"it is {colour}", "answer": colour})
    return found


def tiny_tokenizer(template: str | None) -> Any:
    """A byte-level tokenizer that knows the questions' words, and the marks of ChatML."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([text for each in questions() for text in each.values()], trainer)
    backend.add_special_tokens([AddedToken(name) for name in ("<|end|>", "<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>" if template else "<|end|>")
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(**changes: Any) -> Any:
    """A LLaMA of a few thousand numbers, the same every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {
        "vocab_size": 320, "hidden_size": 32, "intermediate_size": 88, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**options | changes))


def make_tuning_ground(folder: Path) -> TuningGround:
    """A model with two tokenizers, and a file of questions."""
    for name, template in (("chat", CHATML), ("bare", None)):
        tiny_model().save_pretrained(folder / name)
        tiny_tokenizer(template).save_pretrained(folder / name)
    data = folder / "questions.jsonl"
    write_lines(data, questions())
    return TuningGround(folder / "chat", folder / "bare", data, folder / "cache")


def write_lines(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_gguf(path):
    """The tiny model, which is returned, with a tokenizer, as llama.cpp has them: matrices in 8 bits."""
    gguf = pytest.importorskip("gguf")
    model, tokenizer = tiny_model(tie_word_embeddings=False), tiny_tokenizer(CHATML)
    config, backend = model.config, json.loads(tokenizer.backend_tokenizer.to_str())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    names = [name for name, _ in words] + [f"<unused{n}>" for n in range(config.vocab_size - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(names)
    writer.add_token_types([1] * len(names))
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHATML)
    named = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "model.layers": "blk",
    }  # fmt: skip
    eight_bits = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in model.state_dict().items():
        for ours, theirs in named.items():
            name = name.replace(ours, theirs)
        if tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), eight_bits), raw_dtype=eight_bits)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
