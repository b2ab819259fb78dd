#!/bin/sh
# The API with nothing but curl. Usage: clients/curl/examples.sh [BASE_URL]
set -eu
base=${1:-http://127.0.0.1:8000}
say='"messages": [{"role": "user", "content": "Say hi in three words."}], "temperature": 0, "max_tokens": 4'

show() {
    printf '\n# %s\n' "$1"
}

post() {
    curl -sS --fail-with-body "$base/v1/chat/completions" -H 'content-type: application/json' "$@"
}

show 'Is it ready, and what does it serve?'
curl -sS --fail-with-body "$base/ready"; echo
curl -sS --fail-with-body "$base/v1/models"; echo

show 'A chat with the exact log-probability of every token'
post -d "{$say, \"return_logprobs\": true}"; echo

show 'The same with complete raw rows, as base64 float16 (shortened here)'
post -d "{$say, \"return_logits\": true}" | cut -c 1-700; echo

show 'The same as an Arrow stream, written to a file'
out=$(mktemp)
post -H 'accept: application/vnd.apache.arrow.stream' -d "{$say}" -o "$out" \
    -w '%{http_code} %{content_type} %{size_download} bytes\n'
rm -f "$out"

show 'A mistake: the error names the field, and the nearest known one'
curl -sS "$base/v1/chat/completions" -H 'content-type: application/json' -d "{$say, \"return_logit\": true}"; echo
