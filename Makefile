# make setup       create .venv with the exact versions of constraints.txt
# make bench       benchmark training on this machine's GPUs, or on two CPU ranks
# make train-demo  train a small model on synthetic sounds, on two CPU ranks (about 6 minutes);
#                  KIND=mel or KIND=waveform: on prepared shards
# make test        run lint, unit tests and end-to-end tests
# make test-processors  run the unit tests once per instruction set of this CPU; TESTS=… selects tests
# make lint        run ruff, mypy and the checks of imports between packages
# make docs        build the site of docs/ in site/; broken links are errors
# make pictures    redraw the committed pictures whose records or drawing code have changed
# make report      RUNS="…" [OUTPUT=report]: write one HTML page about runs, logs or tables
# make gpu-check   benchmark and test this machine's GPU in three calls of 9 minutes (CALL=1, 2, 3), kept under results/;
#                  MINUTES=… sets a call's length
# make wheelhouse  collect wheels for a machine without an index; for another kind: TARGET_PYTHON=3.12 TARGET_MACHINE=aarch64;
#                  FOR=gpu-check: only those that gpu-check needs beyond torch, torchaudio and transformers
# Each sets up .venv first. PYTHON=… uses another interpreter's packages and installs nothing.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := bench
.PHONY: setup bench train-demo test test-processors lint unit end-to-end docs pictures report gpu-check wheelhouse clean

ifdef PYTHON
READY :=
else
PYTHON := .venv/bin/python
READY := .venv/.ready
endif

.venv/.ready: setup.py pyproject.toml constraints.txt clap_ds/utils/paths.py clap_ds/model/torchaudio_compat.py
	@echo "setting up .venv (once): torch with its CUDA libraries is several GB"
	@test -x .venv/bin/python || "$${BASE_PYTHON:-python3}" -m venv .venv
	@.venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch
	@.venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt --editable '.[train,analysis,embed,test]'
	@.venv/bin/python -m clap_ds.model.torchaudio_compat
	@# Linux truncates a script's first line at a space in the path of its Python.
	@find .venv/bin -type f -exec sed -i '1s|^#!/.* .*/bin/python[0-9.]*$$|#!/usr/bin/env python|' {} +
	@touch $@

setup: $(READY)

LAUNCH = "$(PYTHON)" -m deepspeed.launcher.runner --quiet --master_port $$(shuf -n 1 -i 16000-31999)

bench: $(READY)
	@case "$$("$(PYTHON)" -m clap_ds.distributed.accelerator)" in \
	cpu) echo "no GPU in use: running two CPU ranks"; export DS_ACCELERATOR=cpu; set -- --num_gpus 2 clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny_cpu.json ;; \
	?*) set -- clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny.json ;; \
	*) exit 2 ;; \
	esac; echo "deepspeed $$*"; $(LAUNCH) "$$@"

SOUNDS := -m examples.synthetic_sounds
DEMO := runs/train_demo_data
KIND := encoded

train-demo: $(READY)
	rm -rf $(DEMO) runs/train_demo-*-checkpoints
	"$(PYTHON)" $(SOUNDS) $(DEMO)/train --wordings train --clips 4800 --shards 8 --seconds 1-3 --sample_rate 16000 --format wav
	"$(PYTHON)" $(SOUNDS) $(DEMO)/held_out --wordings held_out --clips 480 --shards 2 --seed 1 --seconds 1-3 --sample_rate 16000 --format wav
ifneq ($(KIND),encoded)
	for side in train held_out; do "$(PYTHON)" -m clap_ds shards prepare "$(DEMO)/$$side/*.tar" "$(DEMO)/$(KIND)/$$side" --kind $(KIND) --preset demo; done
	sed 's#$(DEMO)/\([a-z_]*\)/\*#$(DEMO)/$(KIND)/\1/*#' ds_configs/train_demo_cpu.json > $(DEMO)/$(KIND).json
endif
	DS_ACCELERATOR=cpu $(LAUNCH) --num_gpus 2 clap_ds/train.py --deepspeed_config $(if $(filter encoded,$(KIND)),ds_configs/train_demo_cpu.json,$(DEMO)/$(KIND).json)

lint: $(READY)
	"$(PYTHON)" -m ruff check .
	"$(PYTHON)" -m ruff format --check .
	"$(PYTHON)" -m mypy
	"$(PYTHON)" -c 'import importlinter.cli; importlinter.cli.lint_imports_command()' --no-logo --no-cache

# One worker per core runs whole modules, the longest first (tests/conftest.py). OMP_NUM_THREADS would limit nproc.
WORKERS := $(shell cores=$$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc); echo $$((cores < 4 ? cores : 4)))
PYTEST = "$(PYTHON)" -m pytest -q --no-loadscope-reorder -n $(WORKERS)

unit: $(READY)
	$(PYTEST) -m 'not end_to_end and not gpu' $(or $(TESTS),tests)

end-to-end: $(READY)
	$(PYTEST) -m 'end_to_end and not gpu' tests

# One more worker runs the cluster's tests, which mostly wait.
test: WORKERS := $(shell echo $$(($(WORKERS) + 1)))
test: lint $(READY)
	$(PYTEST) -m 'not gpu' --durations 15 tests

test-processors: $(READY)
	"$(PYTHON)" .ci/processors.py $(PYTEST) -m 'not end_to_end and not gpu' $(or $(TESTS),tests)

docs: $(READY)
	@$(if $(READY),"$(PYTHON)" -m pip install -qq --disable-pip-version-check -c constraints.txt --editable '.[docs]')
	"$(PYTHON)" -m mkdocs build --strict

pictures: $(READY)
	"$(PYTHON)" docs/pictures/redraw.py

report: $(READY)
	@test -n "$(RUNS)" || { echo 'RUNS is not set: pass RUNS="run directories, logs or tables"' >&2; exit 2; }
	"$(PYTHON)" -m clap_ds report $(RUNS) --output $(or $(OUTPUT),report)

# With PYTHON=…, packages of a local wheelhouse that it lacks are installed to runs/packages.
gpu-check: export PYTHONPATH := $(CURDIR)/runs/packages$(addprefix :,$(PYTHONPATH))
LACKING = import importlib.metadata, pathlib, sys; plain = lambda name: name.lower().replace("-", "_"); \
    there = {plain(each.name) for each in importlib.metadata.distributions()}; \
    print(*(each for each in sys.argv[1:] if plain(pathlib.Path(each).name.split("-")[0]) not in there), sep="\n")

gpu-check: $(READY)
	@$(if $(READY),,"$(PYTHON)" -c '$(LACKING)' $(wildcard $(WHEELHOUSE)/*.whl) | xargs -r "$(PYTHON)" -m pip install \
	    --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target runs/packages)
	"$(PYTHON)" -m benchmarks.gpu_check $(or $(CALL),1) $(if $(MINUTES),--minutes "$(MINUTES)") $(if $(OUTPUT),--output "$(OUTPUT)")

# This package and all pins of constraints.txt, except those of which a GPU machine has its own builds.
WHEELHOUSE := wheelhouse
THERE := torch|torchaudio|transformers|triton
FOR := all
CHECKED := annotated-types|braceexpand|cffi|einops|hjson|iniconfig|msgpack|ninja|nvidia-ml-py|pluggy|psutil|py-cpuinfo|pycparser|pydantic|pydantic_core|pytest|soundfile|typing-inspection|webdataset
WANTED = $(if $(filter gpu-check,$(FOR)),$(CHECKED),.*)
BASE = "$(if $(READY),$(or $(BASE_PYTHON),python3),$(PYTHON))"
PIP = $(BASE) -m pip --quiet --disable-pip-version-check
TARGET_PYTHON ?= $(shell $(BASE) -c 'import platform; print(platform.python_version())')
TARGET_MACHINE ?= $(patsubst arm64,aarch64,$(shell uname -m))
PLATFORMS = $(patsubst %,--platform %_$(TARGET_MACHINE),manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_17 manylinux2014)

wheelhouse:
	rm -rf "$(WHEELHOUSE)" build
	$(PIP) wheel --no-deps --wheel-dir "$(WHEELHOUSE)" $(if $(filter gpu-check,$(FOR)),,.) "$$(grep ^deepspeed== constraints.txt)"
	grep -E '^($(WANTED))==' constraints.txt | grep -vE '^(#|($(THERE)|deepspeed)==)' | xargs $(PIP) download --no-deps \
	    --dest "$(WHEELHOUSE)" --only-binary=:all: --implementation cp --python-version $(TARGET_PYTHON) $(PLATFORMS)
	du -sh "$(WHEELHOUSE)"

clean:
	rm -rf .venv runs wheelhouse build site *.egg-info
