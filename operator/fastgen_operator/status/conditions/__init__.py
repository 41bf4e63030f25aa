"""The conditions of a FastGenDeployment. This package is their only writer. Pure.

Each condition has a module, which documents its meaning and source; `reasons.yaml` beside the package has the
reasons. To add one, write its module and add it to `table`. All conditions except `table.OPTIONAL` are set from the
first reconcile on, if necessary to Unknown.
"""
