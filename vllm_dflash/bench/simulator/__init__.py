# SPDX-License-Identifier: Apache-2.0
"""The block length controller against measured cost tables, without an engine."""
