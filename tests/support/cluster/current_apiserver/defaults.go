// The defaults that the API server sets.

package main

import (
	admission "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// setDefaults sets the defaults of a pod that every client expects, and those without which admission does not work.
func setDefaults(object runtime.Object) {
	switch typed := object.(type) {
	case *corev1.Pod:
		if typed.Spec.RestartPolicy == "" {
			typed.Spec.RestartPolicy = corev1.RestartPolicyAlways
		}
		setDefault(&typed.Spec.TerminationGracePeriodSeconds, int64(30))
	case *admission.ValidatingAdmissionPolicy:
		setDefault(&typed.Spec.FailurePolicy, admission.Fail)
		setMatchDefaults(typed.Spec.MatchConstraints)
	case *admission.ValidatingAdmissionPolicyBinding:
		setMatchDefaults(typed.Spec.MatchResources)
	case *admission.MutatingAdmissionPolicy:
		setDefault(&typed.Spec.FailurePolicy, admission.Fail)
		setMatchDefaults(typed.Spec.MatchConstraints)
	case *admission.MutatingAdmissionPolicyBinding:
		setMatchDefaults(typed.Spec.MatchResources)
	case *admission.ValidatingWebhookConfiguration:
		for index := range typed.Webhooks {
			hook := &typed.Webhooks[index]
			setDefault(&hook.FailurePolicy, admission.Fail)
			setDefault(&hook.MatchPolicy, admission.Equivalent)
			setDefault(&hook.NamespaceSelector, metav1.LabelSelector{})
			setDefault(&hook.ObjectSelector, metav1.LabelSelector{})
			setDefault(&hook.TimeoutSeconds, 10)
			setRuleDefaults(hook.Rules)
		}
	}
}

func setDefault[T any](field **T, value T) {
	if *field == nil {
		*field = &value
	}
}

func setMatchDefaults(match *admission.MatchResources) {
	if match == nil {
		return
	}
	setDefault(&match.MatchPolicy, admission.Equivalent)
	setDefault(&match.NamespaceSelector, metav1.LabelSelector{})
	setDefault(&match.ObjectSelector, metav1.LabelSelector{})
	for _, rules := range [][]admission.NamedRuleWithOperations{match.ResourceRules, match.ExcludeResourceRules} {
		for index := range rules {
			setDefault(&rules[index].Scope, admission.AllScopes)
		}
	}
}

func setRuleDefaults(rules []admission.RuleWithOperations) {
	for index := range rules {
		setDefault(&rules[index].Scope, admission.AllScopes)
	}
}
