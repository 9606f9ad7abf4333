# Each target works from a fresh clone: it makes .venv first, where there is none.

VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/ready
LABS := $(wildcard labs/*.ipynb)
PYTHON ?=
# Two at once, file by file in order: ranks wait for each other, and one test alone leaves half a core idle or more.
TWO := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help book html lab labs weights test test-more bench set-repository requirements clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' Makefile

book: html ## Build the book and serve it on localhost
	@$(RUN) tools/serve.py _build/html

html: $(READY) ## Build the book from the labs' committed outputs
	@$(RUN) -c 'from jupyter_book.cli.main import main; main()' build . --quiet

lab: weights ## Open the labs in JupyterLab
	@$(RUN) -m jupyter lab labs $(if $(filter 0,$(shell id -u)),--allow-root)

labs: weights ## Run all labs again, in place
	@$(RUN) tools/run_labs.py $(LABS)

weights: $(READY) ## Fetch the real model that labs and tests cut (once)
	@$(RUN) -m shardlab.model.pretrained

test: weights ## Check everything: ruff, mypy, all tests, every lab, the book
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) -m pytest tests $(LABS) --nbval-lax --nbval-sanitize-with tests/sanitize.cfg --nbval-cell-timeout 120 $(TWO)

test-more: $(READY) ## Run what `make test` leaves out: the same properties on more and larger cases
	$(RUN) -m pytest tests -m more $(TWO)

bench: $(READY) ## Measure the library beside PyTorch's own
	@for script in bench/*.py; do echo "$$script"; $(RUN) "$$script" || exit 1; done

set-repository: $(READY) ## Set where the book is published: URL=https://github.com/you/yours
	@$(RUN) tools/set_repository.py $(if $(filter undefined,$(origin URL)),,--url "$(URL)")

requirements: ## Write requirements.txt anew from requirements.in
	@rm -rf _build/freeze && $(or $(PYTHON),python3.11) -m venv _build/freeze
	@_build/freeze/bin/python -m pip install -r requirements.in
	@_build/freeze/bin/python -m pip freeze --all | _build/freeze/bin/python tools/freeze.py > requirements.txt

clean: ## Remove what was built; .venv and the weights stay
	rm -rf _build build dist

$(READY): requirements.txt pyproject.toml tools/make_venv.sh
	@sh tools/make_venv.sh $(VENV) $(PYTHON)
	@touch $@
