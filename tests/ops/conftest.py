# SPDX-License-Identifier: Apache-2.0
from hypothesis import settings

# The first example of a test pays for imports and thread pools, and the machine is shared: time is not what
# is tested.
settings.register_profile("ops", deadline=None, max_examples=30)
settings.load_profile("ops")
