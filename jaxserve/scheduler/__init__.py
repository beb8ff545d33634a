"""Who computes what in the next step: sequences, KV pages and slots, in plain Python."""

from jaxserve.scheduler.pages import OutOfPages as OutOfPages
from jaxserve.scheduler.pages import PagePool as PagePool
from jaxserve.scheduler.scheduler import Scheduler as Scheduler
