#!/usr/bin/env bash
# Keys and values on SmolLM2-135M: searches at six mean budgets, and a sweep of pairs of key and value quantizers, with equal groups, dense
# window and sinks. Usage: scripts/front-values.sh TEXTS OUT, as scripts/front.sh, whose statistics it shares. Takes about an hour and a half
# on two cores; started again, it goes on where it stopped.
set -euo pipefail
texts=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
cd "$(dirname "$0")/.."
headq=${HEADQ:-target/release/headq}
model=checkpoints/smollm2
sizes=g=128,r=128,sinks=4
nats=ranges=lloyd,metric=fisher,pool=model
values=ranges=lloyd,pool=model

[ -f "$out/stats.safetensors" ] || "$headq" calibrate $model --text "$texts/valid.clean.txt" --context 2048 --windows 4 \
  --base 'klt-2(g=128,r=128)' --gradients --out "$out/stats.safetensors"

schemes=()
for bits in 2.0 2.25 2.5 3.0 3.5 4.0; do
  [ -f "$out/kv$bits.json" ] || "$headq" search $model --stats "$out/stats.safetensors" --text "$texts/valid.clean.txt" --context 2048 \
    --skip 4 --windows 2 --bits $bits --out "$out/kv$bits.json"
  schemes+=("$out/kv$bits.json")
done
# Means of 2 to 4 bits, keys with 0.85 of the mean.
for pair in 1.7/2.3 1.912/2.587 2.125/2.875 2.55/3.45 2.975/4.025 3.4/4.6; do
  schemes+=("klt-${pair%/*}($sizes,$nats)/klt-${pair#*/}($values)")
done
for pair in 1.5/2 2/2 2.5/2 2.5/3 3.5/3 3.5/4; do schemes+=("klt-${pair%/*}($sizes,$nats)/token-${pair#*/}(c=64)"); done
for pair in 1.25/2 1.8/2 2.25/3 3/3 3/4; do schemes+=("klt-${pair%/*}($sizes)/token-${pair#*/}(c=64)"); done
for bits in 2 3; do schemes+=("klt-$bits($sizes,ranges=static)/klt-$bits(ranges=static,metric=output)"); done
schemes+=("klt-2($sizes,ranges=static)/token-2(c=64)" "grid-2($sizes,c=1,center)/token-2(c=64)" "kivi-2($sizes)/token-2(c=64)")
schemes+=("kivi-2($sizes)+score-optimal(rank=4,bits=4)/token-2(c=64)")
schemes+=("kivi-2($sizes,range=0.85,rounding=score-aware,lambda=0.03)/token-3(c=64)")
schemes+=("kivi-3($sizes)/token-2(c=64)" "kivi-3($sizes)/token-3(c=64)")
schemes+=("kivi-3($sizes)+score-optimal(rank=4,bits=4)/token-4(c=64)" "kivi-2($sizes)/a2-3(c=64)")
schemes+=("rotated-3($sizes)/token-3(c=64)" "token-3($sizes,c=32)/token-3(c=64)")

asked=()
for scheme in "${schemes[@]}"; do asked+=(--scheme "$scheme"); done
"$headq" sweep $model --text "$texts/wiki.test.raw" --context 2048 --windows 8 --stats "$out/stats.safetensors" \
  --calibration-text "$texts/valid.clean.txt" --calibration-windows 4 --only-schemes "${asked[@]}" --bits 2,2.25,2.5,3,3.5,4 \
  --out "$out/values"
