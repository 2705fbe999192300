"""Plans and accounts as data, with what their texts need.

plan           `Plan`: degrees of parallelism and other choices, with its text form
account        `Account`: time and memory of a step by part, for a text or a page
account_text   an account as text
units          numbers as text with units
text_table     tables as text
progress_bar   progress bar on a terminal, for work that takes longer than a second
"""
