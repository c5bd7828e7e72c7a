# `make help` lists the targets. Whatever takes more than two lines is a script in scripts/.
.DEFAULT_GOAL := help
.PHONY: help setup demo up test faults fuzz check bench-kernels lock clean

# two busy processes on few cores otherwise spin against each other in OpenMP's barriers
export OMP_WAIT_POLICY ?= PASSIVE
# tests and the demo bring their own checkpoints
export HF_HUB_OFFLINE ?= 1

BIN := .venv/bin

##@ Run

demo: setup ## render one clip with a tiny random checkpoint, check it, stop (ARGS="--prompt ... --seconds 5")
	@$(BIN)/rushes demo --end-with-parent $(ARGS)

up: setup ## run everything on this machine until Ctrl-C (ARGS="--port 8000 --layout r1s1 --checkpoint DIR")
	@$(BIN)/rushes up --end-with-parent $(ARGS)

##@ Develop

setup: ## make .venv from the hashed lock; does nothing when that is done
	@scripts/setup.sh

test: setup ## run all tests (ARGS="tests/unit -k canvas")
	@scripts/test.sh $(ARGS)

faults: setup ## play the fault matrix (ARGS="--only 6,24 --seed 7", "--mutants", "--replay FILE")
	@PYTHONPATH=tests $(BIN)/python -P -m support.faults.matrix $(ARGS)

fuzz: setup ## send some 10,000 made-up requests to the API (ARGS="--examples 100 --seed 7")
	@PYTHONPATH=tests $(BIN)/python -P -m support.fuzz $(ARGS)

check: setup ## check format, lint, import contracts and types
	@scripts/check.sh

lock: ## resolve requirements/cpu.lock anew; needs uv (FIND_LINKS=DIR where the CPU build of torch lies)
	@scripts/lock.sh

clean: ## remove the environment, caches and the demo's state; .state and out/ stay
	@scripts/clean.sh

bench-kernels: setup ## time every kernel on the CUDA device, one JSON line a case; refuses when its tests fail
	@for name in block_sparse_attention heads_attention linear_layers scaled_layers tile_kernels row_kernels; do $(BIN)/python kernels/benchmarks/$$name.py || exit 1; done

##@ Help

help: ## list the targets
	@awk -f scripts/help.awk $(MAKEFILE_LIST)
