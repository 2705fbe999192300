"""Rules as text and as data, and the interface of local forms.

In reading order:

    equation     the notation of rules, `"... k * n k + n -> ... n"`, and its parser
    local_call   `LocalCall`: how a local form reads its call and communicates
    rule         `Rule`: an equation, and properties that an equation cannot express
    dim_names    helpers for the text of rules: a factor name per dim
"""
