"""Plans each step: which sequences compute which tokens, with which pages and slots. Plain
Python."""

from jaxserve.scheduler.pages import OutOfPages as OutOfPages
from jaxserve.scheduler.pages import PagePool as PagePool
from jaxserve.scheduler.scheduler import Scheduler as Scheduler
