"""Requests that arrive by the clock: what is asked, who asks it, who answers, what that took."""
