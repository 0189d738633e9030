#!/bin/sh
# Generates the Python side of the wire and of CANN's header:
# generate.sh <bin folder of the tools> <output folder>.
set -eu
bin=$1
out=$2
"$bin/python" -m grpc_tools.protoc -I proto \
    --plugin=protoc-gen-mypy="$bin/protoc-gen-mypy" \
    --plugin=protoc-gen-mypy_grpc="$bin/protoc-gen-mypy_grpc" \
    --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
    proto/rankdump/wire/v1/*.proto
"$bin/python" -m grpc_tools.protoc -I proto \
    --plugin=protoc-gen-mypy="$bin/protoc-gen-mypy" \
    --python_out="$out" --mypy_out="$out" \
    proto/rankdump/dumpdata/v1/*.proto
# Files without a service leave an empty stub behind.
for name in control events status model; do
    rm -f "$out/rankdump/wire/v1/${name}_pb2_grpc.py" "$out/rankdump/wire/v1/${name}_pb2_grpc.pyi"
done
