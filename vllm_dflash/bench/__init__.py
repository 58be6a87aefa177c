# SPDX-License-Identifier: Apache-2.0
"""Measurements of the package on the machine that it runs on."""
