"""What the user asks for: frozen and validated."""

from finefit.spec.load import load_spec, parse_spec, spec_from_json, spec_to_json, whole_text
from finefit.spec.schema import Spec

__all__ = ["Spec", "load_spec", "parse_spec", "spec_from_json", "spec_to_json", "whole_text"]
