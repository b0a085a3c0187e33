-- The health of a RolloutJob for Argo CD, which has it as the variable "obj". README.md says how to install it.
local status = obj.status or {}
local conditions = {}
for _, condition in ipairs(status.conditions or {}) do
  conditions[condition.type] = condition
end
local ready = conditions.Ready

if ready == nil or (status.observedGeneration or 0) < (obj.metadata.generation or 0) then
  return {status = "Progressing", message = "The operator has not seen this version of the manifest yet."}
end

local function is_true(name)
  return conditions[name] ~= nil and conditions[name].status == "True"
end

local health = "Progressing"
if is_true("Stalled") then
  health = "Degraded"
elseif is_true("Suspended") then
  health = "Suspended"
elseif is_true("Ready") then
  health = "Healthy"
end
return {status = health, message = ready.message}
