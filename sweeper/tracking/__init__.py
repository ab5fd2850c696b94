"""What MLflow is shown. Written from the side, never read to decide.

The worker appends events to a spool on disk (`spool.Tracker`) and goes on training; a process of its own (`writer`)
replays them to MLflow (`delivery`, the only module that imports it). Every event can be replayed without harm, so that
a kill or an outage anywhere between loses nothing and doubles nothing.
"""

from sweeper.tracking.settings import TrackingSettings, check_tracking
from sweeper.tracking.spool import Tracker
from sweeper.tracking.texts import redact

__all__ = ["Tracker", "TrackingSettings", "check_tracking", "redact"]
