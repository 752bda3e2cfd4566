#!/usr/bin/env python3
"""Greedy decoding speed of `headq generate` beside transformers on torch: same file, same prompt, same cores, f32, interleaved.

Needs: pip install torch transformers accelerate gguf. Usage, from the repository's root after `cargo build --release`:

    python3 scripts/decode-speed.py checkpoints/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf TEXT [--scheme S]… [--rounds 5]

The prompt is the beginning of TEXT. Both sides take the prompt in one pass, then one token at a time; a decode step of either is
counted from logits to logits. torch runs with each number of threads in --torch-threads, and the best median counts. Prints each
round's decode steps per second, the medians, their ratio, whether both wrote the same tokens, and what bounds a step: bytes of
weights per step against the speed at which this machine reads memory.

Leave the machine alone meanwhile: torch's threads wait for each other and slow down out of all proportion where they share cores with
other work. The load is printed, and a warning where it is more than this measurement makes by itself.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def prompt_of(tokenizer, text, tokens):
    """The beginning of a text that encodes to so many tokens, and their ids."""
    ids = tokenizer(text[: 16 * tokens], add_special_tokens=False).input_ids[:tokens]
    while ids:
        part = tokenizer.decode(ids)
        again = tokenizer(part, add_special_tokens=False).input_ids
        if again == ids:
            return part, ids
        ids = ids[:-1]
    raise SystemExit("the text has no beginning that encodes to itself")


def run_headq(args, scheme, prompt_file):
    command = [args.headq, "generate", args.gguf, "--prompt-file", prompt_file, "--greedy", "--ignore-eos", "--json", "--quiet"]
    command += ["--max-tokens", str(args.tokens), "--scheme", scheme, "--cache-dtype", args.cache_dtype]
    command += ["--threads", str(args.threads)]
    for stats in args.stats:
        command += ["--stats", stats]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def run_torch(model, ids, tokens, threads):
    """Seconds of the prompt, decode steps per second, and the new tokens."""
    torch.set_num_threads(threads)
    with torch.inference_mode():
        start = time.perf_counter()
        out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        prompt = time.perf_counter() - start
        start = time.perf_counter()
        new = [int(out.logits[0, -1].argmax())]
        while len(new) < tokens:
            out = model(torch.tensor([new[-1:]]), past_key_values=out.past_key_values, use_cache=True)
            new.append(int(out.logits[0, -1].argmax()))
    return prompt, (tokens - 1) / (time.perf_counter() - start), new


def read_speed(bytes_per_step):
    """Bytes per second of a plain read of as many bytes, best of several."""
    data = torch.ones(bytes_per_step // 4)
    best = 0.0
    for _ in range(10):
        start = time.perf_counter()
        data.sum()
        best = max(best, bytes_per_step / (time.perf_counter() - start))
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("gguf")
    parser.add_argument("text")
    parser.add_argument("--headq", default="target/release/headq")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt, at most")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--torch-threads", type=int, nargs="+", help="1 and --threads by default")
    parser.add_argument("--scheme", action="append", default=[], help="scheme of the cache; repeat for several; dense by default")
    parser.add_argument("--stats", action="append", default=[], help="statistics for schemes with a side code")
    parser.add_argument("--cache-dtype", default="f32", choices=["f16", "f32"])
    args = parser.parse_args()
    schemes = args.scheme or ["dense"]
    counts = args.torch_threads or sorted({1, args.threads})

    folder, name = os.path.split(os.path.abspath(args.gguf))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    with open(args.text, encoding="utf-8") as file:
        prompt, ids = prompt_of(tokenizer, file.read(1_000_000), args.prompt)
    # The one line end that `--prompt-file` leaves out.
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8", newline="") as file:
        file.write(prompt + "\n")
        file.flush()
        run_torch(model, ids, 4, args.threads)
        ours, theirs, prompts = {s: [] for s in schemes}, {t: [] for t in counts}, []
        for n in range(args.rounds):
            shown, load = [], os.getloadavg()[0]
            for scheme in schemes:
                report = run_headq(args, scheme, file.name)
                if report["prompt_tokens"] != len(ids):
                    raise SystemExit(f"headq reads {report['prompt_tokens']} tokens, transformers {len(ids)}")
                ours[scheme].append(report["tokens_per_second"])
                shown.append(f"headq {scheme} {report['tokens_per_second']:.1f}")
                if scheme == "dense":
                    prompts.append(report["prefill_seconds"])
                    dense = report["tokens"]
            for threads in counts:
                seconds, speed, new = run_torch(model, ids, args.tokens, threads)
                theirs[threads].append(speed)
                shown.append(f"torch ({threads} threads) {speed:.1f} (prompt {seconds:.2f} s)")
            print(f"round {n + 1}: {', '.join(shown)} tokens/s; load {load:.1f}", flush=True)
            if load > args.threads + 1:
                print("warning: this machine has other work; the ratio says little")

    torch_median = max(statistics.median(speeds) for speeds in theirs.values())
    for scheme in schemes:
        median = statistics.median(ours[scheme])
        print(f"median {scheme}: headq {median:.1f}, torch {torch_median:.1f} tokens/s, ratio {median / torch_median:.2f}")
    if "dense" in schemes:
        same = next((i for i, (a, b) in enumerate(zip(dense, new)) if a != b), len(new))
        print(f"prompt: headq {statistics.median(prompts):.2f} s; the first {same} of {len(new)} new tokens are the same")
    config = model.config
    head = 0 if config.tie_word_embeddings else model.lm_head.weight.numel()
    step = 4 * (sum(p.numel() for p in model.model.parameters()) + head)
    read = read_speed(step)
    fastest = max(statistics.median(v) for v in ours.values())
    print(
        f"a step reads {step / 1e6:.0f} MB of weights: {step * fastest / 1e9:.1f} GB/s at {fastest:.1f} tokens/s,"
        f" of {read / 1e9:.1f} GB/s that torch sums at"
    )


main()
