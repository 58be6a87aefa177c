# SPDX-License-Identifier: Apache-2.0
"""What a draft checkpoint says: its config in both dialects, its weights, the catalogue, the pair checks."""
