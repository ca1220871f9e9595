package trial

import (
	"errors"
	"testing"
	"testing/synctest"

	"vllmtuner/serverctl"
)

func TestRequestsThatAreTurnedAwayAreNobodysFault(t *testing.T) {
	for evidence, want := range map[string]serverctl.Class{
		"all 9 requests of the warm-up failed: http-status: 429: too many": serverctl.Infrastructure,
		"all 9 requests of the warm-up failed: http-status: 404: no model": serverctl.Infrastructure,
		"all 9 requests of the warm-up failed: http-status: 400: too long": serverctl.CrashLoad,
		"all 9 requests of the warm-up failed: http-status: 500: an error": serverctl.CrashLoad,
		"all 9 requests of the warm-up failed: truncated: no end":          serverctl.CrashLoad,
	} {
		synctest.Test(t, func(t *testing.T) {
			exit, ok := errors.AsType[*serverctl.ExitError](useless(t.Context(), &stub{}, evidence))
			if !ok || exit.Class != want {
				t.Errorf("%s: %v, want %s", evidence, exit, want)
			}
		})
	}
}
