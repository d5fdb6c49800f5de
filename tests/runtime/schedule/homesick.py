"""A host tier that nobody stays in who could be elsewhere."""

from dualpace.runtime.schedule.draft import Draft
from dualpace.runtime.schedule.host_admission import ProfiledAdmission


class Homesick(ProfiledAdmission):
    """Calls everybody home, whatever that costs and whoever waits."""

    def calls_home(self, draft: Draft) -> bool:
        return True
