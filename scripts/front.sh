#!/usr/bin/env bash
# The front of README: statistics with gradients, searches at six budgets, and a sweep of every family of key quantizers on SmolLM2-135M.
# Usage: scripts/front.sh TEXTS OUT, with valid.clean.txt and wiki.test.raw in TEXTS. Takes about an hour on two cores; started again, it
# goes on where it stopped.
set -euo pipefail
texts=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
cd "$(dirname "$0")/.."
headq=${HEADQ:-target/release/headq}
model=checkpoints/smollm2
sizes=g=128,r=128,sinks=4
nats=ranges=lloyd,metric=fisher,pool=model

[ -f "$out/stats.safetensors" ] || "$headq" calibrate $model --text "$texts/valid.clean.txt" --context 2048 --windows 4 \
  --base 'klt-2(g=128,r=128)' --gradients --out "$out/stats.safetensors"

schemes=()
for bits in 2 2.25 2.5 3 3.5 4; do
  [ -f "$out/k$bits.json" ] || "$headq" search $model --stats "$out/stats.safetensors" --text "$texts/valid.clean.txt" --context 2048 \
    --skip 4 --windows 2 --keys-only --bits $bits --out "$out/k$bits.json"
  schemes+=("$out/k$bits.json" "klt-$bits($sizes,$nats)" "klt-$bits($sizes,ranges=static)")
done
for bits in 1.8 2 2.25 2.75 3.25 3.75; do schemes+=("klt-$bits($sizes)"); done
for bits in 2 3; do
  schemes+=("kivi-$bits($sizes)" "rotated-$bits($sizes)" "token-$bits($sizes,c=32)" "token-$bits($sizes)")
  schemes+=("kivi-$bits($sizes)+query-pca(rank=4,bits=4)" "kivi-$bits($sizes)+score-optimal(rank=4,bits=4)")
done
for bits in 2 3 4; do
  schemes+=("grid-$bits($sizes,c=1,center)" "grid-$bits($sizes,c=1,rounding=score-aware,center)")
done
schemes+=("kivi-2($sizes,range=0.85,rounding=score-aware,lambda=0.03)" "kivi-3($sizes,rounding=score-aware,lambda=0.03)")
schemes+=("token-2($sizes,c=32)+score-optimal(rank=4,bits=4)" "kivi-2($sizes,range=0.85)+score-optimal(rank=4,bits=4)")

asked=()
for scheme in "${schemes[@]}"; do asked+=(--scheme "$scheme"); done
"$headq" sweep $model --text "$texts/wiki.test.raw" --context 2048 --windows 8 --stats "$out/stats.safetensors" \
  --calibration-text "$texts/valid.clean.txt" --calibration-windows 4 --only-schemes "${asked[@]}" --bits 2,2.25,2.5,3,3.5,4 \
  --out "$out/sweep"
