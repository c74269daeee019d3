"""Fine-tune a causal language model with the Hugging Face Trainer and DeepSpeed. One file, free to copy.

    deepspeed --num_gpus 2 finetune.py --model tiny --deepspeed zero2_offload_optimizer_bf16.json
    torchrun --nproc_per_node 2 finetune.py --model qwen-0.5b --deepspeed zero3_bf16.json --eval-every 10
    python finetune.py --model my-model/ --dataset notes.txt more.txt --steps 200 --save-every 50

A preset (such as tiny, gpt2 or qwen-0.5b) has the shape of the real model with random weights, and its tokens are
bytes: it needs no download and takes as much memory as the real one. Without a GPU, training runs on the CPU.
Invalid input ends the script with one sentence and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import sysconfig
import tempfile
from pathlib import Path

PRESETS = {
    "tiny": {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
    },
    "qwen-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "llama-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "qwen-1.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "llama-3b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "mistral-7b": {
        "model_type": "mistral",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
    },
    "qwen-7b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
    "llama-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "llama-70b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
}
FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
EVAL_BATCHES = 4  # per rank: enough to measure an evaluation, few enough to be quick
CHARACTERS_PER_TOKEN = 8  # more than with any common tokenizer, so that enough text is read


class BadInput(Exception):
    """The input is invalid; the message says why."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="finetune.py", description=__doc__.splitlines()[0])
    add, count = parser.add_argument, parse_positive
    add("--model", default="tiny", help=f"preset ({', '.join(PRESETS)}), local folder, or hub id [tiny]")
    add("--dataset", nargs="+", metavar="SOURCE", help="hub id, or local files: text, json, csv, parquet "
        "[the source text of this machine's Python library]")  # fmt: skip
    add("--seq-length", type=count, default=256, help="tokens per row [256]")
    add("--micro-batch", type=count, default=4, help="rows per rank and micro-batch [4]")
    add("--eval-micro-batch", type=count, help="rows per rank in evaluation [twice --micro-batch]")
    add("--eval-every", type=count, metavar="STEPS", help="evaluate every STEPS steps [never]")
    add("--steps", type=count, default=100, help="optimizer steps to train [100]")
    add("--gradient-accumulation", type=count, default=1, help="micro-batches per step [1]")
    add("--gradient-checkpointing", action="store_true", help="recompute activations to save memory")
    add("--save-every", type=count, metavar="STEPS", help="save a checkpoint every STEPS steps [never]")
    add(
        "--deepspeed",
        metavar="CONFIG",
        help="DeepSpeed config, a JSON file, which also sets bf16 or fp16 [none]",
    )
    add("--learning-rate", type=float, default=1e-4, help="initial learning rate, which decays linearly to 0 [1e-4]")
    add("--seed", type=int, default=42, help="seed of the random weights and of the row order [42]")
    add("--output-dir", help="folder for checkpoints [a temporary one, removed at the end]")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    options = parser.parse_args()
    options.eval_micro_batch = options.eval_micro_batch or 2 * options.micro_batch
    options.deepspeed = options.deepspeed or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    return options


def parse_positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def read_config(path: str | None) -> dict:
    """Return the DeepSpeed config; empty without a file."""
    if path is None:
        return {}
    try:
        import hjson  # comes with DeepSpeed, which reads its configs with it

        config = hjson.loads(Path(path).read_text())
    except OSError as error:
        raise BadInput(f"cannot read the DeepSpeed config {path}: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"the DeepSpeed config {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadInput(f"the DeepSpeed config {path} is not a JSON object")
    return config


def prepare_environment() -> None:
    """Set what a launcher would have set; without one, this is a world of one rank.

    Must run before torch and deepspeed are imported.
    """
    # DeepSpeed compiles its operators with the ninja that pip installed next to this Python.
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # accelerate launch --cpu sets a variable with which accelerate would disable DeepSpeed.
    if os.environ.pop("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        os.environ["DS_ACCELERATOR"] = "cpu"
    if "RANK" not in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:  # plain python
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in world.items()})


def uses_cpu() -> bool:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return os.environ.get("DS_ACCELERATOR") == "cpu"


def is_enabled(config: dict, section: str) -> bool:
    return config.get(section, {}).get("enabled", False) in (True, "auto")


def make_training_arguments(options: argparse.Namespace, config: dict):
    """Must come before the model: under ZeRO-3, the integration then partitions the model while it is built."""
    from transformers import TrainingArguments

    bf16 = is_enabled(config, "bf16")
    return TrainingArguments(
        output_dir=options.output_dir or tempfile.gettempdir(),
        deepspeed=config or None,
        use_cpu=uses_cpu(),
        bf16=bf16,
        fp16=is_enabled(config, "fp16") and not bf16,
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        per_device_eval_batch_size=options.eval_micro_batch,
        gradient_accumulation_steps=options.gradient_accumulation,
        gradient_checkpointing=options.gradient_checkpointing or None,
        learning_rate=options.learning_rate,
        eval_strategy="steps" if options.eval_every else "no",
        eval_steps=options.eval_every,
        save_strategy="steps" if options.save_every else "no",
        save_steps=options.save_every or 500,
        save_total_limit=1,
        prediction_loss_only=True,  # predictions over a large vocabulary would fill the memory
        logging_steps=1,
        report_to="none",
        seed=options.seed,
    )


def load_model_config(name: str, seq_length: int):
    from transformers import AutoConfig

    if name in PRESETS:
        config = AutoConfig.for_model(**PRESETS[name])
    else:
        config = load_from_hub(AutoConfig.from_pretrained, name, "model")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and seq_length > limit:
        raise BadInput(f"--seq-length {seq_length} is more than the {limit} tokens that {name} supports")
    config.use_cache = False  # needed for text generation only
    return config


def build_model(name: str, config, dtype, device):
    """Build the model; a preset directly on ``device``, as 8 billion random numbers take minutes on a CPU."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.integrations import is_deepspeed_zero3_enabled

    if name not in PRESETS:
        return load_from_hub(AutoModelForCausalLM.from_pretrained, name, "model", config=config, dtype=dtype)
    if is_deepspeed_zero3_enabled():  # chooses the device and keeps only this rank's partition
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def load_from_hub(load, name: str, kind: str, **arguments):
    try:
        return load(name, **arguments)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        choice = f" (and it is not a preset: {', '.join(PRESETS)})" if kind == "model" else ""
        raise BadInput(f"cannot load the {kind} {name}{choice}: {reason}") from error


def make_tokenizer(name: str):
    """Return a function from text to a list of token ids."""
    if name in PRESETS:
        return lambda text: list(text.encode())  # one token per byte
    from transformers import AutoTokenizer

    tokenizer = load_from_hub(AutoTokenizer.from_pretrained, name, "tokenizer")
    return lambda text: tokenizer(text, verbose=False)["input_ids"]


def read_texts(sources: list[str] | None, characters: int) -> list[str]:
    """Read texts until they have at least ``characters`` characters."""
    texts, read = [], 0
    for text in iter_library_texts() if sources is None else iter_dataset_texts(sources):
        texts.append(text)
        read += len(text)
        if read >= characters:
            break
    if not read:
        raise BadInput(f"there is no text in {' '.join(sources or ['the Python library of this machine'])}")
    return texts


def iter_library_texts():
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def iter_dataset_texts(sources: list[str]):
    """Yield the text column of files or a hub data set row by row, without a copy in the cache."""
    import datasets

    try:
        if is_file_name(sources[0]):
            kind = FORMATS.get(Path(sources[0]).suffix.lower(), "text")
            rows = datasets.load_dataset(kind, data_files=sources, split="train", streaming=True)
        else:
            rows = datasets.load_dataset(*sources[:2], split="train", streaming=True)
        for row in rows:
            yield row[choose_text_column(row, sources)]
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInput(f"cannot read the data set {' '.join(sources)}: {reason}") from error


def is_file_name(source: str) -> bool:
    return os.path.exists(source) or Path(source).suffix.lower() in {".txt", ".md", *FORMATS}


def choose_text_column(row: dict, sources: list[str]) -> str:
    columns = [name for name, value in row.items() if isinstance(value, str)]
    if not columns:
        raise BadInput(f"no column of {' '.join(sources)} holds text; its columns are {', '.join(row)}")
    return "text" if "text" in columns else columns[0]


def make_blocks(texts: list[str], tokenize, seq_length: int, cache: str):
    """Pack texts into rows of exactly ``seq_length`` tokens; the data set is stored in the folder ``cache``."""
    import datasets

    def pack_tokens(batch: dict) -> dict:
        tokens = [token for text in batch["text"] for token in tokenize(text)]
        starts = range(0, len(tokens) - seq_length + 1, seq_length)
        rows = [tokens[start : start + seq_length] for start in starts]
        return {"input_ids": rows, "labels": rows}

    rows = datasets.Dataset.from_dict({"text": texts})
    return rows.map(pack_tokens, batched=True, remove_columns="text", cache_file_name=f"{cache}/blocks.arrow")


def make_datasets(options: argparse.Namespace, args, folder: str) -> tuple:
    """Return the train set and the eval set or None, with as many rows as needed; one rank per node packs them."""
    eval_rows = EVAL_BATCHES * options.eval_micro_batch * args.world_size if options.eval_every else 0
    rows = eval_rows + options.steps * options.gradient_accumulation * options.micro_batch * args.world_size
    texts = read_texts(options.dataset, rows * options.seq_length * CHARACTERS_PER_TOKEN)
    cache = os.path.join(folder, "data")
    with args.main_process_first(desc="packing the text"):
        os.makedirs(cache, exist_ok=True)
        blocks = make_blocks(texts, make_tokenizer(options.model), options.seq_length, cache)
    if len(blocks) < (2 if eval_rows else 1):
        raise BadInput(f"the text fills {len(blocks)} rows of {options.seq_length} tokens: too few to train on")
    eval_rows = min(eval_rows, len(blocks) // 2)
    train = blocks.select(range(eval_rows, min(rows, len(blocks))))
    return train, blocks.select(range(eval_rows)) if eval_rows else None


def train_model(options: argparse.Namespace, config: dict) -> None:
    import torch
    from accelerate.utils import broadcast_object_list
    from transformers import Trainer, default_data_collator, set_seed

    model_config = load_model_config(options.model, options.seq_length)
    args = make_training_arguments(options, config)
    if config and args.use_cpu:  # on CPU the Trainer creates the process group without DeepSpeed
        import deepspeed

        deepspeed.init_distributed()
    own_folder = tempfile.mkdtemp(prefix="finetune-") if args.process_index == 0 else None
    folder = broadcast_object_list([own_folder])[0]
    args.output_dir = options.output_dir or os.path.join(folder, "checkpoints")
    try:
        train_set, eval_set = make_datasets(options, args, folder)
        set_seed(options.seed)
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
        model = build_model(options.model, model_config, dtype, args.device)
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=train_set,
            eval_dataset=eval_set,
            data_collator=default_data_collator,
        )
        trainer.train()
        if args.process_index == 0:
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            print(f"final loss {losses[-1]:.4f} after {trainer.state.global_step} steps", flush=True)
        args.distributed_state.wait_for_everyone()  # other ranks may still write to the folder
    finally:
        if args.local_process_index == 0:
            shutil.rmtree(folder, ignore_errors=True)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def main() -> int:
    options = parse_arguments()
    try:
        config = read_config(options.deepspeed)
        prepare_environment()
        train_model(options, config)
    except BadInput as error:
        print(f"finetune.py: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
