from __future__ import annotations

from hypothesis import settings

# Examples draw whole rings of threads; a deadline an example would only measure the machine.
settings.register_profile("ringrt", deadline=None, max_examples=60)
settings.load_profile("ringrt")
