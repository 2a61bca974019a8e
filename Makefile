# make setup       .venv, with the exact versions of constraints.txt
# make bench       the main job on what this machine has
# make train-demo  trains a small model on sounds it makes, on two CPU ranks, until it knows them (about 5 minutes)
# make test        lint, unit tests and end-to-end tests
# make lint        ruff and mypy
# make report      RUNS="…" [OUTPUT=report]: one HTML page about runs, logs or tables
# make gpu-check   GPU tests and benchmarks of one GPU, kept under results/
# make wheelhouse  wheels for a machine without an index
# Each sets up .venv by itself. PYTHON=… uses another interpreter's packages instead, installing nothing.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := bench
.PHONY: setup bench train-demo test lint unit end-to-end report gpu-check wheelhouse clean

ifdef PYTHON
BIN := $(dir $(shell command -v $(PYTHON)))
READY :=
else
BIN := .venv/bin/
PYTHON := $(BIN)python
READY := .venv/.ready
endif

.venv/.ready: setup.py constraints.txt clap_ds/__init__.py
	@echo "setting up .venv, once: torch with its CUDA libraries is several GB"
	@test -x .venv/bin/python || $${BASE_PYTHON:-python3} -m venv .venv
	@.venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch
	@.venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt --editable '.[train,analysis,test]'
	@touch $@

setup: $(READY)

# DeepSpeed's launcher without its page of lines, and on a port of its own, so that two runs don't meet. Errors are still told.
PORT = $(PYTHON) -c 'from clap_ds.rendezvous import free_port; print(free_port())'
LAUNCH = $(PYTHON) -m deepspeed.launcher.runner --quiet --master_port "$$($(PORT))"

bench: $(READY)
	@case "$$($(PYTHON) -m clap_ds.accelerator)" in \
	cuda) set -- clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny.json ;; \
	cpu) echo "no GPU in use: two ranks on the CPUs"; export DS_ACCELERATOR=cpu; set -- --num_gpus 2 clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny_cpu.json ;; \
	*) exit 2 ;; \
	esac; echo "deepspeed $$*"; $(LAUNCH) "$$@"

SOUNDS := -m clap_ds.data.sounds
DEMO := runs/train_demo_data

train-demo: $(READY)
	rm -rf $(DEMO) runs/train_demo-checkpoints
	$(PYTHON) $(SOUNDS) $(DEMO)/train --wordings train --clips 5200 --shards 8 --seconds 1-3 --sample_rate 16000 --format wav
	$(PYTHON) $(SOUNDS) $(DEMO)/held_out --wordings held_out --clips 520 --shards 2 --seed 1 --seconds 1-3 --sample_rate 16000 --format wav
	DS_ACCELERATOR=cpu $(LAUNCH) --num_gpus 2 clap_ds/train.py --deepspeed_config ds_configs/train_demo_cpu.json

lint: $(READY)
	$(PYTHON) -m ruff check --config .ci/ruff.toml .
	$(PYTHON) -m ruff format --config .ci/ruff.toml --check .
	$(PYTHON) -m mypy --config-file .ci/mypy.ini

unit: $(READY)
	$(PYTHON) -m pytest -q -m 'not end_to_end and not gpu' tests

end-to-end: $(READY)
	$(PYTHON) -m pytest -q -m end_to_end tests

test: lint $(READY)
	$(PYTHON) -m pytest -q -m 'not gpu' --durations 15 tests

report: $(READY)
	@test -n "$(RUNS)" || { echo 'give RUNS="run directories, logs or tables"' >&2; exit 2; }
	$(PYTHON) analysis/report.py $(RUNS) --output $(or $(OUTPUT),report)

gpu-check: $(READY)
	$(PYTHON) launch/gpu_check.py

# What a GPU machine that has torch, torchaudio, transformers and triton still needs.
wheelhouse:
	rm -rf wheelhouse
	python3 -m pip wheel --no-deps --quiet --wheel-dir wheelhouse "$$(grep ^deepspeed== constraints.txt)"
	grep -hE '^(hjson|pydantic|pydantic_core|annotated-types|webdataset|braceexpand|soundfile|nvidia-ml-py)==' constraints.txt \
	| xargs python3 -m pip download --no-deps --quiet --dest wheelhouse --only-binary=:all: --implementation cp \
	    --python-version $(or $(TARGET_PYTHON),3.12) --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
	    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64
	du -sh wheelhouse

clean:
	rm -rf .venv runs wheelhouse build *.egg-info
