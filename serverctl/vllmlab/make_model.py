#!/usr/bin/env python3
"""Makes a tiny model directory of the Qwen2 architecture: config, tokenizer and chat template, no weights, no download.

usage: make_model.py DIR [VOCABULARY]

Serve it with `vllm serve DIR --load-format dummy`. Its answers are noise that soon repeats itself. They are
useless for acceptance rates of speculative decoding and for the quality of answers.
"""

import json
import pathlib
import sys
import sysconfig

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MAX_POSITION = 32768  # room for any --max-model-len that a test wants
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


def train_tokenizer(vocabulary):
    """Trains a byte-level BPE on English-like text that is on every machine with Python: its standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:150]
    texts = (f.read_text(encoding="utf-8", errors="ignore") for f in files)
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def write(path, value):
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(int(sys.argv[2]) if len(sys.argv) == 3 else 4096)
    tokenizer.save(str(out / "tokenizer.json"))
    write(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "model_max_length": MAX_POSITION,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    })
    write(out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0, "do_sample": False})
    write(out / "config.json", {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_sliding_window": False,
        "initializer_range": 0.02,
    })


if __name__ == "__main__":
    main()
