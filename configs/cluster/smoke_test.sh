#!/bin/sh
# Smoke test of the image, on any machine: builds a corpus, trains, resumes, exports, generates and serves.
#
#   podman run --rm --entrypoint sh zaya:latest /zaya/configs/cluster/smoke_test.sh
#
# It needs neither a GPU nor a network, and ends with "smoke test passed". On a node with GPUs, `zaya doctor` checks
# these.
set -eu
configs=$(cd "$(dirname "$0")/.." && pwd)
cd "$(mktemp -d)"

train() {
    zaya train --config="$configs/tiny.py" --config.run_folder=run --config.data.corpus=corpus \
        --config.data.tokenizer=byte --config.data.tokenizer_vocab_size=None --config.data.sequence_length=128 \
        --config.data.batch_size=8 --config.train.eval_sequences=8 --config.train.sample_tokens=0 \
        --config.optimizer.schedule=constant --config.optimizer.warmup_steps=1 \
        --config.train.num_steps="$1"
}

zaya data build corpus --source "$configs" --pattern '*.py' --block-tokens 128
train 2
train 4   # resumes at step 2
zaya convert run exported --verify
zaya generate run --prompt "def " --max-new-tokens 8

zaya serve run --port 8970 --max-length 128 --slots 1 &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
python3 - <<'END'
import json
import time
import urllib.error
import urllib.request

address = "http://127.0.0.1:8970"
# The server answers 503 while it loads and compiles.
for _ in range(600):
    try:
        urllib.request.urlopen(address + "/health").close()
        break
    except OSError:
        time.sleep(1)
body = json.dumps({"prompt": "def ", "max_tokens": 4}).encode()
request = urllib.request.Request(address + "/v1/completions", body, {"Content-Type": "application/json"})
with urllib.request.urlopen(request) as response:
    print(json.load(response)["usage"])
END
kill "$server"
wait "$server"
echo "smoke test passed"
