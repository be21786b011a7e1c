#!/usr/bin/env bash
# Everything that CI cannot see, in one call on a machine with a GPU: the GPU tests, compute-sanitizer on a short
# selection, and the benchmark tables. Writes one record: benchmarks/results/DATE-GPU.json, or into FOLDER.
#
#   scripts/gpu_check.sh [FOLDER]
#
# PYTHON=... chooses the interpreter (default: .venv/bin/python, else python3); WORK=... keeps the logs in that folder.
#
# Commit the record together with the kernels it was made from; its digests say which those are. Never edit one.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
folder=${1:-benchmarks/results}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
work=${WORK:-$(mktemp -d)}
[ -n "${WORK:-}" ] || trap 'rm -rf "$work"' EXIT
mkdir -p "$work"
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} KDA_CUPY_REQUIRE_GPU=1

# The float64 references take longer than the kernels, so the tests are dealt out to several processes; the sanitizers run
# beside them. Tests that time something, or hold a stream up to see who waits, come afterwards and have the GPU alone.
"$python" -m pytest tests/gpu --collect-only -q -p no:cacheprovider 2> /dev/null | grep '::' > "$work/all"
alone='test_(bench|bench_host|bridge|pool_streams)\.py'
grep -vE "$alone" "$work/all" > "$work/together"
grep -E "$alone" "$work/all" > "$work/part.alone"
split -n "r/${JOBS:-10}" "$work/together" "$work/part.with."
run_part() {
    "$python" -m pytest "@$1" -q -p no:cacheprovider > "$1.log" 2>&1
    echo "exit code $?" >> "$1.log"
}
# Every array its own allocation, or a stray access would land in CuPy's memory pool and go unseen.
chosen="agrees_with and (kda or gdn) and (softplus or bounded or K100 or K256 or K512 or K64-V24)"
chosen="sanitizer_selection or test_packed_decode and ($chosen or odd-row or views_have or padding_rows or past_the_pool)"
files=(tests/gpu/test_packed_decode.py tests/gpu/test_mtp.py tests/gpu/test_step.py tests/gpu/test_conv.py)
sanitize() {
    KDA_CUPY_TEST_WITHOUT_POOL=1 timeout "${SANITIZER_LIMIT:-1800}" \
        compute-sanitizer --tool "$1" --error-exitcode 9 \
        "$python" -m pytest "${files[@]}" -q -p no:cacheprovider -k "$chosen" > "$work/$1.log" 2>&1
    echo "exit code $?" >> "$work/$1.log"
}
sanitize memcheck &
sanitize racecheck &
for part in "$work"/part.with.*; do
    run_part "$part" &
done
wait
run_part "$work/part.alone"
echo "== tests"
cat "$work"/part.*.log > "$work/tests.log"
grep -E "^(FAILED|ERROR)|(passed|failed|error).* in |exit code [^0]" "$work/tests.log"
for tool in memcheck racecheck; do
    echo "== compute-sanitizer $tool"
    grep -E "passed|failed|SUMMARY|exit code" "$work/$tool.log"
done

echo "== compute-sanitizer on a planted error"
compute-sanitizer --tool memcheck --error-exitcode 9 "$python" -c '
import cupy
cupy.cuda.set_allocator(None)
store = cupy.RawKernel("extern \"C\" __global__ void store(float* x) { x[1000] = 1; }", "store")
store((1,), (1,), (cupy.zeros(4, "float32"),))
cupy.cuda.Device().synchronize()' > "$work/planted.log" 2>&1
echo "exit code $?" >> "$work/planted.log"
grep -E "SUMMARY|exit code" "$work/planted.log"

echo "== benchmark"
# BENCH_LIMIT=SECONDS ends it early, as Ctrl-C would; the record then says that it is not complete.
${BENCH_LIMIT:+timeout --signal INT "$BENCH_LIMIT"} \
    "$python" -m kda_cupy bench suite --backend cuda --repeats 15 --json "$work/bench.json"

"$python" scripts/write_gpu_record.py "$work" "$folder"
