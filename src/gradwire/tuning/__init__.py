"""`auto`: calibration of links and codecs, the step clock, candidates, and the choice among them."""
