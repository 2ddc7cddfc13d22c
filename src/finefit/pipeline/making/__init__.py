"""Stages that train nothing: a module each, whose `make` fills a folder in a process of its own and tells what it has done."""
