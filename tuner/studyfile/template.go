package studyfile

import _ "embed"

//go:embed template.yaml
var template string

// Template returns the commented study file that `tuner init` prints: a 70B model on one H200.
func Template() string { return template }
