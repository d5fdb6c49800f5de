"""Offline profiling of one machine (paper 4.3 and Appendix B): measure, fit, explain, hand over."""
