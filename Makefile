# SPDX-License-Identifier: Apache-2.0
# make setup | demo-pair | demo | test | lint.  PYTHON names the interpreter, MACHINE=cpu|cuda overrides detection.
PYTHON ?= python3
export PYTHON MACHINE
RUN := .venv/bin/python

.PHONY: setup
.DEFAULT_GOAL := setup

setup:
	@sh scripts/setup.sh
