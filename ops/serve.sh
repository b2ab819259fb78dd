#!/usr/bin/env bash
# Serves as `just serve` does, without just. `ops/serve.sh --help` says what can be set.
set -euo pipefail

# The call may go through a link that lies elsewhere.
self=$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null) || self=${BASH_SOURCE[0]}
root=$(cd "$(dirname "$self")/.." && pwd)

usage() {
  cat <<'TEXT'
Usage: [VARIABLE=value ...] ops/serve.sh [--check]

  NUM_GPUS=2 WALL_TIME=8h MODEL_NAME=Qwen/Qwen2.5-32B-Instruct ./ops/serve.sh

--check looks whether that would work, and says what to do; it installs nothing.
Makes .venv first, if need be. SIGTERM and Ctrl-C let running requests finish; then the exit code is 0.

Variables of the launch:

| variable | default | meaning |
|---|---|---|
| `NUM_GPUS` | all | The first n GPUs; 0 is none |
| `GPU_IDS` | all | These GPUs, such as `0,2,5`, numbered as nvidia-smi does; not with NUM_GPUS |
| `WALL_TIME` | `0` | When to end: `3600` or `3600s`, `90m`, `8h`, `2d`; 0 is never |
| `KILL_AFTER` | `30` | Seconds from WALL_TIME, or from a signal, to SIGKILL; only with WALL_TIME |
| `PYTHON` | `.venv` | An interpreter that has the packages already; nothing is installed then |

If CUDA_VISIBLE_DEVICES is set, NUM_GPUS takes the first of those and GPU_IDS must be among them.
With WALL_TIME the default of DRAIN_TIMEOUT is 10 less than KILL_AFTER. The exit code is 0 after a drain at the
wall time, 137 if SIGKILL had to come, 2 if a variable is refused, and else the server's own.

All other settings:

TEXT
}

refuse() {
  echo "serve.sh: $1" >&2
  exit 2
}

# A folder of the caller's that is called like one of the packages must not be taken for it.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1

is_check=false
case ${1:-} in
  "") ;;
  --check) is_check=true ;;
  --help | -h)
    usage
    "${PYTHON:-$root/.venv/bin/python}" -c 'from service.settings import settings_table; print(settings_table())' \
      2>/dev/null || echo "see README.md; the first start makes .venv, and then they are listed here"
    exit 0
    ;;
  *) refuse "unknown argument $1; settings are variables, see --help" ;;
esac

# Devices.

select_gpus() {
  local -a visible=() chosen=()
  [[ -z ${NUM_GPUS:-} || -z ${GPU_IDS:-} ]] || refuse "NUM_GPUS=$NUM_GPUS and GPU_IDS=$GPU_IDS: set one of them"
  # An empty list is a list: it hides every GPU.
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES/NoDevFiles/}"
  fi
  if [[ -n ${NUM_GPUS:-} ]]; then
    [[ $NUM_GPUS =~ ^[0-9]{1,3}$ ]] || refuse "NUM_GPUS='$NUM_GPUS': expected a number of GPUs, such as 2"
    local -i num=$((10#$NUM_GPUS))
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
      ((num <= ${#visible[@]})) ||
        refuse "NUM_GPUS=$NUM_GPUS, but CUDA_VISIBLE_DEVICES='$CUDA_VISIBLE_DEVICES' names ${#visible[@]}"
      chosen=("${visible[@]:0:num}")
    else
      local -i id
      for ((id = 0; id < num; id++)); do chosen+=("$id"); done
    fi
  elif [[ -n ${GPU_IDS:-} ]]; then
    local one='(0|[1-9][0-9]*|(GPU|MIG)-[A-Za-z0-9/-]+)'
    [[ $GPU_IDS =~ ^$one(,$one)*$ ]] || refuse "GPU_IDS='$GPU_IDS': expected numbers with commas, such as 0,2,5"
    IFS=, read -ra chosen <<<"$GPU_IDS"
    local seen=, id
    for id in "${chosen[@]}"; do
      [[ $seen != *",$id,"* ]] || refuse "GPU_IDS='$GPU_IDS' names $id twice"
      seen+=$id,
      [[ -z ${CUDA_VISIBLE_DEVICES+set} || ,$CUDA_VISIBLE_DEVICES, == *",$id,"* ]] ||
        refuse "GPU_IDS='$GPU_IDS': $id is not among CUDA_VISIBLE_DEVICES='$CUDA_VISIBLE_DEVICES'"
    done
  else
    return 0
  fi
  check_present ${chosen[@]+"${chosen[@]}"}
  CUDA_VISIBLE_DEVICES=$(
    IFS=,
    echo "${chosen[*]-}"
  )
  export CUDA_VISIBLE_DEVICES
  # CUDA would number the fastest GPU first; people read the numbers from nvidia-smi.
  export CUDA_DEVICE_ORDER=${CUDA_DEVICE_ORDER:-PCI_BUS_ID}
}

# CUDA passes over devices that are not there, and the model would quietly run on what is left.
check_present() {
  (($# > 0)) || return 0
  local listed
  if ! listed=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null); then
    echo "serve.sh: nvidia-smi does not answer, so these GPUs may be missing: $*" >&2
    return 0
  fi
  local id
  for id in "$@"; do
    [[ ! $id =~ ^[0-9]+$ ]] || grep -qx "$id" <<<"$listed" ||
      refuse "there is no GPU $id; nvidia-smi lists $(paste -sd, - <<<"$listed")"
  done
}

# Time.

WALL_TIME=${WALL_TIME:-0}
[[ $WALL_TIME =~ ^[0-9]+[smhd]?$ ]] || refuse "WALL_TIME='$WALL_TIME': expected 3600, 90m, 8h, 2d or 0"
is_timed=true
[[ ! $WALL_TIME =~ ^0+[smhd]?$ ]] || is_timed=false

limit_time() {
  KILL_AFTER=${KILL_AFTER:-30}
  [[ $KILL_AFTER =~ ^[1-9][0-9]*$ ]] || refuse "KILL_AFTER='$KILL_AFTER': expected seconds, such as 30"
  timeout --foreground --preserve-status --kill-after=9 9 true 2>/dev/null ||
    refuse "WALL_TIME=$WALL_TIME needs GNU timeout (coreutils)"
  local -i farewell=10 # for the answers that the drain has cut
  if [[ -z ${DRAIN_TIMEOUT:-} ]]; then
    export DRAIN_TIMEOUT=$((KILL_AFTER > farewell ? KILL_AFTER - farewell : 0))
  elif [[ $DRAIN_TIMEOUT =~ ^([0-9]{1,9})(\.[0-9]*)?$ ]] && ((10#${BASH_REMATCH[1]} > KILL_AFTER - farewell)); then
    echo "serve.sh: DRAIN_TIMEOUT=$DRAIN_TIMEOUT may take longer than SIGKILL waits: KILL_AFTER=$KILL_AFTER" >&2
  fi
}

select_gpus
prefix=()
if $is_timed; then
  limit_time
  # In the foreground timeout signals the server alone, and only once; the server's exit code is ours.
  prefix=(timeout --foreground --preserve-status "--kill-after=$KILL_AFTER" "$WALL_TIME")
fi
if $is_check; then
  [[ -n ${PYTHON:-} || ! -x $root/.venv/bin/python ]] || PYTHON=$root/.venv/bin/python
  exec "${PYTHON:-python3}" -m ops.doctor
fi
if [[ -z ${PYTHON:-} ]]; then
  python3 "$root/ops/bootstrap.py" --for serve
  PYTHON=$root/.venv/bin/python
fi
exec ${prefix[@]+"${prefix[@]}"} "$PYTHON" -m service
