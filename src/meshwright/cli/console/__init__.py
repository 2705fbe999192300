"""Command lines, files and answers: the parts that all commands share.

parser             parse a command line, and name the closest match for an unknown word
config_file        read settings from a TOML file or from a Python function
user_function      call a function that is named as `file.py:function`
files              read, check and write files that are named on a command line
finding            a finding of `doctor`
output             print text without control characters, or one JSON object
language_model     the model and the text that a command line names
quantize_page      the result of `quantize` as an HTML page
conformance_page   the results of `conformance` as an HTML page
exit_codes         the exit codes that `--help` documents
"""
