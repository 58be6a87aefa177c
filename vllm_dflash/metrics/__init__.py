# SPDX-License-Identifier: Apache-2.0
"""What is measured: recorded in the worker, carried with the step's statistics, exported by the front end."""
