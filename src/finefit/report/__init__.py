"""Turns records into tables and views. No decisions are made here."""
