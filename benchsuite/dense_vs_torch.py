#!/usr/bin/env python3
"""Dense teacher-forced tokens per second of headq beside transformers on torch: same file, same text, same cores, f32, interleaved.

Needs: pip install torch transformers accelerate gguf. Usage, from the repository's root after `cargo build --release`:

    python3 benchsuite/dense_vs_torch.py checkpoints/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf TEXT [--rounds 5] [--windows 8]

Prints each round's tokens per second, the medians, their ratio, and both perplexities (which must agree: it is the same model).
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf")
    parser.add_argument("text")
    parser.add_argument("--headq", default="target/release/headq")
    parser.add_argument("--max-chars", type=int, default=200_000)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2], help="batch sizes to give torch; the best counts")
    parser.add_argument("--scheme", action="append", default=[], help="also time headq's evaluation of this scheme")
    parser.add_argument("--stats", help="statistics for schemes with a side code")
    args = parser.parse_args()

    torch.set_num_threads(os.cpu_count())
    folder, name = os.path.split(os.path.abspath(args.gguf))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    text = open(args.text, encoding="utf-8").read()[: args.max_chars]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    print(f"transformers' own reading of the file: {len(ids)} tokens, first {ids[:4]}")

    command = [args.headq, "eval", args.gguf, "--text", args.text, "--max-chars", str(args.max_chars), "--context", str(args.context)]
    command += ["--windows", str(args.windows), "--json", "--quiet", "--timings"]
    for scheme in args.scheme or ["dense"]:
        command += ["--scheme", scheme]
    if args.stats:
        command += ["--stats", args.stats]
    if not args.scheme:
        command += ["--no-diagnostics"]

    def run_headq():
        report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return report

    def run_torch(batch):
        windows = torch.tensor(ids[: args.windows * args.context]).view(args.windows, args.context)
        nll, start = 0.0, time.perf_counter()
        with torch.inference_mode():
            for i in range(0, args.windows, batch):
                chunk = windows[i : i + batch]
                logits = model(chunk).logits[:, :-1]
                losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten(), reduction="none")
                nll += losses.double().sum().item()
        seconds = time.perf_counter() - start
        return args.windows * args.context / seconds, math.exp(nll / (args.windows * (args.context - 1)))

    run_torch(args.batch[0])
    ours, theirs = [], {b: [] for b in args.batch}
    for n in range(args.rounds):
        report = run_headq()
        ours.append(args.windows * args.context / report["dense_seconds"])
        for batch in args.batch:
            speed, ppl = run_torch(batch)
            theirs[batch].append(speed)
        shown = ", ".join(f"torch (batch {b}) {theirs[b][-1]:.0f}" for b in args.batch)
        print(f"round {n + 1}: headq {ours[-1]:.0f} tokens/s, {shown}")
    best = max(theirs.values(), key=statistics.median)
    ratio = statistics.median(ours) / statistics.median(best)
    print(f"medians: headq {statistics.median(ours):.0f}, torch {statistics.median(best):.0f} tokens/s, ratio {ratio:.2f}")
    dense = next(s for s in report["schemes"] if s["canonical"] == "dense")
    print(f"perplexity: headq {dense['ppl']:.4f}, torch {ppl:.4f}")
    for scheme in report["schemes"]:
        if scheme.get("seconds"):
            print(f"{scheme['scheme']}: {scheme['seconds'] / report['dense_seconds']:.2f} × a dense pass (last round)")


main()
