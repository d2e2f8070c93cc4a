"""What the fixture forks imports last: its processes need the tests' modules, and nobody looks at their pictures."""
import helpers                                                         # noqa: F401
from conftest import leave_pictures_out

leave_pictures_out(setattr, lambda name: False)
