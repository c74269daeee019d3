# make demo-recorded    replays a recording of four GPUs; installs neither torch nor DeepSpeed
# make demo             opens the monitor on a real two-rank training with a planted fault, which it launches itself
# make test             checks everything; make test-fast only what needs no real DeepSpeed job
# All install into .venv first. Needed: Python 3.10 or newer and make; for all but the first a C++ compiler, too.
# PYTHON=... chooses the Python.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VIEWER := $(VENV)/.viewer-installed

# The first of the usual names that is new enough.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	$$name -c '$(NEW_ENOUGH)' 2>/dev/null && { echo $$name; break; }; done)
CXX_FOUND = command -v $${CXX:-c++} || command -v g++
HEADER := import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))

# Without their bytecode each of a thousand processes would compile the modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

define CHECK_PYTHON
@{ $(PYTHON) -c '$(NEW_ENOUGH)'; } 2>/dev/null || { echo "zerotop needs Python 3.10 or newer:" \
	"install it, or name it with: make PYTHON=/path/to/python3" >&2; exit 1; }
@{ $(PYTHON) -c 'import venv, ensurepip'; } 2>/dev/null || { echo "$(PYTHON) has no venv module:" \
	"install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
endef

.PHONY: install demo demo-recorded lint size test test-fast test-versions bench pictures clean
.DELETE_ON_ERROR:

install: $(INSTALLED)

# DeepSpeed compiles its operators when they are first used: hence the compiler and Python's headers. Holds the viewer, too.
$(INSTALLED): pyproject.toml constraints.txt hatch_build.py $(wildcard probe/zerotop_probe/inside/native/*.c tui/launcher/*.c)
	$(CHECK_PYTHON)
	@{ $(PYTHON) -c '$(HEADER)'; } 2>/dev/null || { echo "$(PYTHON) has no C headers, which DeepSpeed's operators" \
		"need: install them (Debian, Ubuntu: apt install python3-dev)" >&2; exit 1; }
	@{ $(CXX_FOUND); } >/dev/null || { echo "there is no C++ compiler, which DeepSpeed's operators need:" \
		"install one (Debian, Ubuntu: apt install g++)" >&2; exit 1; }
	@echo "installing zerotop, torch and DeepSpeed into $(VENV): the first time this takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@touch $@ $(VIEWER)

# All but the training: watches jobs of other environments, replays, exports.
$(VIEWER): pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e .
	@touch $@

demo: install
	@$(BIN)/zerotop demo

demo-recorded: $(VIEWER)
	@$(BIN)/zerotop demo --recorded

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy --num-workers auto
	$(BIN)/lint-imports
	$(BIN)/python tests/house_rules.py --quiet

# Lines of each room, beside the table that `lint` holds them to.
size: install
	@$(BIN)/python tests/house_rules.py

# Five workers for two cores: many tests wait. Where real jobs are among the tests, a file stays in one worker, for what
# its tests share, and the files of tests/real come first: they take longest. Tests that measure time or list what runs are
# marked `alone`: one at a time, as those with a GPU.
WORKERS := $(shell n=$$(( $$(nproc 2>/dev/null || echo 2) * 5 / 2 )); echo $$(( n > 8 ? 8 : n )))
test: lint
	$(BIN)/python tests/support/operators.py
	$(BIN)/python -m pytest tests/real tests/ui tests/unit -m "not alone and not gpu" \
		--numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder
	$(BIN)/python -m pytest tests/real tests/gpu -m "alone or gpu"

test-fast: install
	$(BIN)/python -m pytest tests/unit tests/ui --numprocesses $(WORKERS) --dist worksteal

# Not a part of `test`: downloads several GB. VERSIONS is the name of a file in tests/versions, which says for which Python.
VERSIONS ?= oldest
OTHER := .venv-$(VERSIONS)
test-versions:
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -e . -r tests/versions/$(VERSIONS).txt
	$(OTHER)/bin/python -m pytest tests/real/test_plain_loops.py tests/real/test_training_libraries.py \
		tests/real/test_sharded_loops.py tests/real/test_attach_loops.py tests/real/test_hangs.py tests/real/test_slow_lines.py \
		tests/unit/test_optimizer_states.py

# sweep_story.py needs a GPU and a folder for its output; switched_probe.py is a part of others.
BENCHMARKS = $(filter-out benchmarks/sweep_story.py benchmarks/switched_probe.py, $(wildcard benchmarks/*.py))
bench: install
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

pictures: install
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/sweep_pictures.py

clean:
	rm -rf $(VENV) .venv-* dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
